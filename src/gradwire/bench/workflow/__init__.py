"""The workflow: the Snakefile, its rules, schema, report texts and profiles, and the verb that runs them."""
