"""``python -m gradwire``: the same as the console script, for ranks started by a launcher."""

from gradwire.cli import entry

if __name__ == "__main__":
    entry()
