"""Generate on one card or several: generate_custom.py [--model_type NAME] [--input_data TEXT].

    bash scripts/run_dist_gen.sh "python generate_custom.py --model_type gpt2 --use_parallel True \
        --checkpoint_path ./gpt2_ckpt --model_parallel 2" hccl_2p.json '[0,2]' 2

On several cards CHECKPOINT_PATH is a folder with the part of each: rank_0/, rank_1/, ...
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lite_runner import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    ContextConfig,
    ParallelContextConfig,
    PreTrainedModel,
    TransformerOpParallelConfig,
    get_last_checkpoint,
    init_context,
    str2bool,
)


def load_part(network: PreTrainedModel, folder: Path, length: int) -> None:
    """Load the newest checkpoint of `folder`, the part of this card."""
    import mindspore as ms

    ms.Model(network).infer_predict_layout(ms.ops.ones((1, length), ms.int32))
    missing, _ = ms.load_param_into_net(network, ms.load_checkpoint(get_last_checkpoint(folder)))
    assert not missing, f"{folder} lacks {missing}"


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--model_type", default="smollm2_135m", help="a model of conf/model")
    flags.add_argument("--checkpoint_path", help="a checkpoint, or a folder with rank_N")
    flags.add_argument("--input_data", default="I love Beijing,", help="a text, or a file of lines")
    flags.add_argument("--batch_size", default=1, type=int, help="texts computed together")
    flags.add_argument("--device_target", default="auto", help="CPU, Ascend or auto")
    flags.add_argument("--device_id", default=0, type=int)
    flags.add_argument("--use_parallel", default=False, type=str2bool)
    flags.add_argument("--data_parallel", default=1, type=int)
    flags.add_argument("--model_parallel", default=1, type=int)
    flags.add_argument("--max_length", default=128, type=int)
    given = flags.parse_args()

    rank, _ = init_context(
        use_parallel=given.use_parallel,
        context_config=ContextConfig(0, given.device_target, given.device_id),
        parallel_config=ParallelContextConfig(parallel_mode="SEMI_AUTO_PARALLEL", full_batch=True),
    )
    file = Path(given.input_data)
    texts = file.read_text("utf-8").splitlines() if file.is_file() else [given.input_data]

    config = AutoConfig.from_pretrained(given.model_type)
    config.batch_size = given.batch_size
    config.parallel_config = TransformerOpParallelConfig(
        data_parallel=given.data_parallel, model_parallel=given.model_parallel
    )
    if given.use_parallel:
        config.checkpoint_name_or_path = None  # each card reads its own part, below
    elif given.checkpoint_path:
        config.checkpoint_name_or_path = given.checkpoint_path
    network = AutoModel.from_config(config)
    if given.use_parallel:
        load_part(network, Path(given.checkpoint_path) / f"rank_{rank}", config.seq_length)

    tokenizer = AutoTokenizer.from_pretrained(given.model_type)
    ids = network.generate(tokenizer(texts)["input_ids"], max_length=given.max_length)
    if rank == 0:  # all have the same
        print(tokenizer.decode(ids, skip_special_tokens=True))


if __name__ == "__main__":
    main()
