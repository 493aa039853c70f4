"""The forms that no engine serves: the training decoder, transformers, and peft.

One model is in memory at a time; each is given whole sequences, without a cache.

Legend: S tokens, R rows at hand.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.engines.parity.observed import ROWS, Collector, Observed, Sequences
from phalanx.engines.parity.subject import Subject
from phalanx.models.adapter_folder import adapter_weights
from phalanx.models.decoder import Decoder
from phalanx.models.hf import load_decoder
from phalanx.models.lora import inject
from phalanx.models.parameters import load_sharded

_CALL_TOKENS = 512  # of sequences that are packed into one forward pass


def observe_trainer(subject: Subject, sequences: Sequences, dtype: str) -> Observed:
    """The training decoder on packed sequences, as a training step has them.

    Without adapters it is filled from the export: a run keeps no other copy of its last weights.
    """
    if subject.lora is None:
        return observe_export(subject, sequences, dtype)
    return _observe_decoder(_trained_decoder(subject, dtype), sequences, dtype)


def observe_export(subject: Subject, sequences: Sequences, dtype: str) -> Observed:
    """The training decoder on the exported folder."""
    return _observe_decoder(load_decoder(subject.export, dtype=dtype), sequences, dtype)


def _trained_decoder(subject: Subject, dtype: str) -> Decoder:
    """The decoder as a training process builds and fills it, adapters beside their matrices."""
    assert subject.lora is not None and subject.adapter is not None
    config = subject.source.config
    decoder = Decoder(config.with_dtype(dtype), device="meta")
    adapters = inject(decoder, subject.lora, dtype=subject.job.train.master_dtype)
    decoder.to_empty(device="cpu")
    others = {name for name, _ in decoder.named_parameters()} - set(adapters)
    load_sharded(decoder, subject.source.weights, names=others)
    load_sharded(decoder, adapter_weights(subject.adapter, config), names=adapters)
    return decoder


@torch.inference_mode()
def _observe_decoder(decoder: Decoder, sequences: Sequences, dtype: str) -> Observed:
    decoder.eval()
    collector = Collector(sequences, decoder.config.vocab_size, _wide(dtype))
    for packed in _packed(sequences):
        tokens: list[int] = []
        starts, rows, places = [], [], []
        for at in packed:
            starts.append(len(tokens))
            tokens += sequences.inputs(at)
            rows += range(len(tokens) - sequences.num_new, len(tokens))
            places += _places(sequences, at)
        hidden_SD = decoder(torch.tensor(tokens), document_starts=starts)
        for first in range(0, len(rows), ROWS):
            part = slice(first, first + ROWS)
            collector.add(places[part], decoder.logits(hidden_SD[rows[part]]))
    return collector.observed()


def _packed(sequences: Sequences) -> Iterator[list[int]]:
    """Sequences of about `_CALL_TOKENS` together."""
    packed: list[int] = []
    num_tokens = 0
    for at in range(len(sequences.prompts)):
        length = len(sequences.prompts[at]) + sequences.num_new
        if packed and num_tokens + length > _CALL_TOKENS:
            yield packed
            packed, num_tokens = [], 0
        packed.append(at)
        num_tokens += length
    yield packed


def _places(sequences: Sequences, at: int) -> range:
    return range(at * sequences.num_new, (at + 1) * sequences.num_new)


def _wide(dtype: str) -> torch.dtype:
    return torch.promote_types(getattr(torch, dtype), torch.float32)


def observe_transformers(subject: Subject, sequences: Sequences, dtype: str) -> Observed:
    """transformers on the exported folder."""
    model = _pretrained(subject.export, dtype)
    return _observe(model, sequences, subject.served.vocab_size, dtype)


def observe_peft(subject: Subject, sequences: Sequences, dtype: str) -> Observed:
    """transformers on the base, with the adapter in peft."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(_pretrained(subject.base, dtype), str(subject.adapter))
    return _observe(model, sequences, subject.served.vocab_size, dtype)


def _pretrained(folder, dtype: str):
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=getattr(torch, dtype)
    )


@torch.inference_mode()
def _observe(model, sequences: Sequences, vocab_size: int, dtype: str) -> Observed:
    model.eval()
    collector = Collector(sequences, vocab_size, _wide(dtype))
    for batch in _equally_long(sequences):
        tokens_BS = torch.tensor([sequences.inputs(at) for at in batch])
        out = model(tokens_BS, use_cache=False, logits_to_keep=sequences.num_new)
        places = [place for at in batch for place in _places(sequences, at)]
        logits_RV: Tensor = out.logits.flatten(0, 1)
        collector.add(places, logits_RV)
    return collector.observed()


def _equally_long(sequences: Sequences) -> Iterator[list[int]]:
    """Batches that need no padding, of no more rows of logits than `ROWS` if possible."""
    by_length: dict[int, list[int]] = {}
    for at, prompt in enumerate(sequences.prompts):
        by_length.setdefault(len(prompt), []).append(at)
    size = max(1, ROWS // sequences.num_new)
    for alike in by_length.values():
        yield from (alike[first : first + size] for first in range(0, len(alike), size))
