"""Run an LLM job: `python run_lite.py run_mode=predict model=smollm2_135m predict_data='Hi'`."""

from lite_runner.system.own_python import continue_in_own_python

if __name__ == "__main__":
    continue_in_own_python()

    from lite_runner.app import console

    console()
