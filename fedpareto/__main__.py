"""`python -m fedpareto`, for where the console script is not on the path."""

from fedpareto.cli.entry import main

if __name__ == "__main__":
    main()
