"""``python -m kvcompress``: the command line."""

from kvcompress.cli import main

if __name__ == "__main__":
    main()
