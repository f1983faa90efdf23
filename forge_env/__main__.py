"""`python -m forge_env`: the command line without the console script."""

from forge_env.cli.main import program

if __name__ == "__main__":
    program()
