"""`python -m onbeat.cli` is `onbeat`."""

from onbeat.cli import main

if __name__ == "__main__":
    main()
