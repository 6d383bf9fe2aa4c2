"""The command ``bench compressors``: one file per part of it."""
