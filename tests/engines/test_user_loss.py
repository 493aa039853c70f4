"""A user's loss: found, refused with a reason, equal to the built-in when it computes the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed import init_device_mesh

from phalanx.engines.bind import bind_data
from phalanx.engines.user_loss import load_loss, user_loss
from phalanx.errors import JobError, WorldError
from phalanx.ops.loss import counted_cross_entropy
from phalanx.policies.data.fsdp import Fsdp
from tests.models.cases import CONFIGS, random_decoder, random_tokens
from tests.ranks import run_ranks

CONFIG = CONFIGS["one_kv_head_capped"]
TOKENS = 23


def cross_entropy(hidden_ND, head, targets_N, num_counted_global):
    return F.cross_entropy(head(hidden_ND), targets_N, reduction="sum") / num_counted_global


def smoothed(hidden_ND, head, targets_N, num_counted_global):
    logits = head(hidden_ND)
    total = F.cross_entropy(logits, targets_N, reduction="sum", label_smoothing=0.1)
    z = logits.logsumexp(-1).square().sum()
    return (total + 1e-3 * z) / num_counted_global


def batch(rank):
    tokens = random_tokens(CONFIG, TOKENS, seed=rank)
    counted = torch.arange(3 + 2 * rank, TOKENS - 1)
    return tokens, counted, tokens[counted + 1]


def gradients(rank, world_size, which, chunk_bytes):
    """Loss over ranks and whole gradients of a step, by the built-in or a function of ours."""
    decoder = random_decoder(CONFIG)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    data = bind_data(decoder, [Fsdp()], mesh)
    num = sum(len(batch(each)[1]) for each in range(world_size))
    tokens, counted, targets = batch(rank)
    data.begin_item(0, 1)
    hidden = decoder(tokens)
    if which == "built-in":
        cap = CONFIG.logit_soft_cap
        loss = counted_cross_entropy(
            hidden, decoder.head_weight, counted, targets, num_counted_global=num, soft_cap=cap
        )
    else:
        loss = user_loss(
            {"user": cross_entropy, "smoothed": smoothed}[which],
            hidden,
            decoder.logits,
            counted,
            targets,
            num_counted_global=num,
            vocab_size=CONFIG.vocab_size,
            chunk_bytes=chunk_bytes,
        )
    loss.backward()
    data.finish_step()
    grads = {name: p.grad.full_tensor() for name, p in decoder.named_parameters()}
    return data.sum(loss.detach()).item(), grads


@pytest.mark.dist
def test_own_cross_entropy_equals_the_built_in():
    expected, grads = run_ranks(gradients, 2, "built-in", 0)[0]
    for chunk_bytes in (1 << 20, 4 * CONFIG.vocab_size * 5):  # all rows, five at a time
        found, own = run_ranks(gradients, 2, "user", chunk_bytes)[0]
        assert found == pytest.approx(expected, rel=1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(own[name], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.dist
def test_chunks_do_not_change_a_smoothed_loss():
    whole, grads = run_ranks(gradients, 2, "smoothed", 1 << 20)[0]
    parts, own = run_ranks(gradients, 2, "smoothed", 1)[0]  # a row at a time
    assert parts == pytest.approx(whole, rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(own[name], grad, rtol=1e-4, atol=1e-6)


def test_a_chunk_at_a_time_is_held():
    """Nothing of the size of all logits is kept for the backward pass."""
    hidden = torch.randn(40, 8, requires_grad=True)
    weight = torch.randn(50, 8, requires_grad=True)
    kept = []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        user_loss(
            cross_entropy,
            hidden,
            lambda rows: rows @ weight.t(),
            torch.arange(40),
            torch.arange(40),
            num_counted_global=40,
            vocab_size=50,
            chunk_bytes=4 * 50 * 7,
        )
    assert max(kept) <= 400


def test_no_counted_row_gives_zero_and_gradients():
    hidden = torch.randn(4, 8, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    loss = user_loss(
        smoothed,
        hidden,
        lambda rows: rows @ torch.ones(8, 5),
        none,
        none,
        num_counted_global=3,
        vocab_size=5,
    )
    loss.backward()
    assert loss.item() == 0.0 and not hidden.grad.any()


@pytest.mark.parametrize(
    ("returned", "shown"), [(torch.ones(3), r"\[3\]"), (1.0, "float"), (torch.tensor(1), r"\[\]")]
)
def test_a_loss_that_is_no_scalar_is_named(returned, shown):
    def bad(hidden_ND, head, targets_N, num_counted_global):
        return returned

    with pytest.raises(WorldError, match=rf"bad = {shown}: must return a floating-point"):
        user_loss(
            bad,
            torch.ones(2, 2),
            lambda x: x,
            torch.arange(2),
            torch.arange(2),
            num_counted_global=2,
            vocab_size=2,
        )


def test_a_loss_that_fails_is_named_with_its_own_lines():
    def bad(hidden_ND, head, targets_N, num_counted_global):
        raise KeyError("weights")

    with pytest.raises(WorldError, match=r"bad = KeyError") as info:
        user_loss(
            bad,
            torch.ones(2, 2),
            lambda x: x,
            torch.arange(2),
            torch.arange(2),
            num_counted_global=2,
            vocab_size=2,
        )
    assert info.value.code == "train/callback" and 'raise KeyError("weights")' in info.value.detail


@pytest.fixture
def own_losses(tmp_path, monkeypatch):
    """Files of losses in the working folder."""
    (tmp_path / "own_losses_ok.py").write_text(
        "class Box:\n"
        "    @staticmethod\n"
        "    def four(a, b, c, d): return a\n"
        "def plain(hidden_ND, head, targets_N, num_counted_global): return 'mine'\n"
        "def three(a, b, c): return a\n"
        "number = 3\n"
    )
    (tmp_path / "own_losses_broken.py").write_text("import there_is_no_such_package\n")
    (tmp_path / "own_losses_raises.py").write_text("raise RuntimeError('at import')\n")
    monkeypatch.chdir(tmp_path)


def test_functions_of_the_working_folder_are_found(own_losses):
    assert load_loss("own_losses_ok:plain")(1, 2, 3, 4) == "mine"
    assert load_loss("own_losses_ok:Box.four")(1, 2, 3, 4) == 1
    assert load_loss("tests.engines.test_user_loss:smoothed").__name__ == "smoothed"


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("own_losses_ok", "names nothing in a module.*module:name"),
        (":plain", "names nothing"),
        ("own_losses_ko:plain", "there is no module 'own_losses_ko'.*own_losses_ok"),
        ("own_losses_ok:plane", "has no 'plane'.*own_losses_ok:plain"),
        ("own_losses_ok:three", r"takes \(a, b, c\)"),
        ("own_losses_ok:number", "is a int"),
        ("own_losses_broken:x", "needs 'there_is_no_such_package'"),
        ("own_losses_raises:x", r"cannot be imported \(RuntimeError: at import\)"),
        ("own_losses_ok.inner:x", "cannot be imported|there is no module"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(own_losses, spec, match):
    with pytest.raises(JobError, match=match) as info:
        load_loss(spec)
    assert info.value.where == "train.loss" and info.value.value == spec
