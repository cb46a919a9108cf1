"""Fields of config.json that change nothing of what a model computes, each with the reason.

These hold for every family; what only one has is `no_effect` of its Architecture.
"""

from __future__ import annotations

from lite_runner.architectures.fields import Fields

_ORIGIN = "says where the files are from"
TRAINING = "only in training"
_OUTPUT = "what a Python call returns"
CLASSES = "of a head that classifies"
_DTYPE = "weights are read in the dtype they are stored in; compute_dtype= is the run's"
KERNEL = "how transformers computes it, not what"
_SAMPLING = "defaults of sampling: a run has its own keys"

NO_EFFECT = {
    "_name_or_path": _ORIGIN,
    "_commit_hash": _ORIGIN,
    "transformers_version": _ORIGIN,
    "transformers.js_config": _ORIGIN,
    "unsloth_version": _ORIGIN,
    "unsloth_fixed": _ORIGIN,
    "architectures": "the tensors tell",
    "auto_map": "a note says that its code is not run",
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    "attention_dropout": TRAINING,
    "attention_probs_dropout_prob": TRAINING,
    "hidden_dropout": TRAINING,
    "hidden_dropout_prob": TRAINING,
    "initializer_range": TRAINING,
    "gradient_checkpointing": TRAINING,
    "neftune_noise_alpha": TRAINING,
    "use_bfloat16": TRAINING,
    "output_attentions": _OUTPUT,
    "output_hidden_states": _OUTPUT,
    "return_dict": _OUTPUT,
    "use_return_dict": _OUTPUT,
    "torchscript": _OUTPUT,
    "classifier_dropout": CLASSES,
    "finetuning_task": CLASSES,
    "id2label": CLASSES,
    "label2id": CLASSES,
    "num_labels": CLASSES,
    "problem_type": CLASSES,
    "chunk_size_feed_forward": KERNEL,
    "use_cache": KERNEL,
    "_attn_implementation": KERNEL,
    "_attn_implementation_autoset": KERNEL,
    "attn_implementation": KERNEL,
    "_flash_attn_2_enabled": KERNEL,
    "is_decoder": "all models here are decoders",
    "cross_attention_hidden_size": "there is no cross attention",
    "tie_encoder_decoder": "there is no encoder",
    "decoder_start_token_id": "there is no encoder",
    "sep_token_id": "of the tokenizer",
    "unk_token_id": "of the tokenizer",
    "tokenizer_class": "of the tokenizer",
    "prefix": "of a pipeline in Python",
    "task_specific_params": "of a pipeline in Python",
    "max_length": _SAMPLING,
    "min_length": _SAMPLING,
    "do_sample": _SAMPLING,
    "early_stopping": _SAMPLING,
    "num_beams": _SAMPLING,
    "num_beam_groups": _SAMPLING,
    "diversity_penalty": _SAMPLING,
    "temperature": _SAMPLING,
    "top_k": _SAMPLING,
    "top_p": _SAMPLING,
    "typical_p": _SAMPLING,
    "repetition_penalty": _SAMPLING,
    "length_penalty": _SAMPLING,
    "no_repeat_ngram_size": _SAMPLING,
    "encoder_no_repeat_ngram_size": _SAMPLING,
    "bad_words_ids": _SAMPLING,
    "num_return_sequences": _SAMPLING,
    "output_scores": _SAMPLING,
    "return_dict_in_generate": _SAMPLING,
    "forced_bos_token_id": _SAMPLING,
    "forced_eos_token_id": _SAMPLING,
    "remove_invalid_values": _SAMPLING,
    "exponential_decay_length_penalty": _SAMPLING,
    "suppress_tokens": _SAMPLING,
    "begin_suppress_tokens": _SAMPLING,
}


def refuse_variants(fields: Fields) -> None:
    """Fail on a field of any family that changes what it computes. Raises ArtifactError."""
    fields.neutral(
        add_cross_attention=False,
        is_causal=True,
        is_encoder_decoder=False,
        per_layer_config={},  # transformers 5: settings of single layers
        pruned_heads={},
    )
