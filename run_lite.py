"""Run an LLM job: `python run_lite.py run_mode=predict model=smollm2_135m predict_data='Hi'`."""

import sys


def main() -> None:
    """The program `run-lite`. Not in lite_runner/, which another project's package may replace."""
    try:
        from lite_runner.app import console
    except ImportError as error:
        from importlib.metadata import packages_distributions

        if "lite-runner" not in packages_distributions().get("lite_runner", []):
            raise
        again = "pip install --force-reinstall --no-deps . (in the checkout of this one)"
        python = f"{sys.executable} -m"
        print(
            f"error: lite-runner, another project's package, has replaced files of ours: {error}\n"
            f"  -> {python} pip uninstall --yes lite-runner; {python} {again}",
            file=sys.stderr,
        )
        sys.exit(3)
    console()


if __name__ == "__main__":
    from lite_runner.system.own_python import continue_in_own_python

    continue_in_own_python()
    main()
