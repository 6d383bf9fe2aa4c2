"""The subcommand ``bench compressors``: one file per part of it."""
