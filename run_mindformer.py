"""Run an LLM job as MindFormers' script of this name prints it and keeps its results:
`python run_mindformer.py --config predict_llama2_7b.yaml --predict_data 'Hi'`."""

from lite_runner.system.own_python import continue_in_own_python

if __name__ == "__main__":
    continue_in_own_python()

    from lite_runner.app import console

    console(mindformer=True)
