"""Run an LLM job: `python run_lite.py run_mode=predict model=smollm2_135m predict_data='Hi'`."""

from lite_runner.app import console

if __name__ == "__main__":
    console()
