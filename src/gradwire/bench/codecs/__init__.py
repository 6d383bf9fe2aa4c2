"""The verb ``bench compressors``: one file per part of it."""
