"""The workflow: the Snakefile, its rules, schema, report texts and profiles, and the command that runs them."""
