"""`python -m lite_runner ARGS`: what run_lite.py does, where the package is installed."""

from lite_runner.app import console

if __name__ == "__main__":
    console()
