"""Fused projections: found by name and shape, cut by default, and then equal to Muon on separate projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard.optim.fused_weights import find_fused
from tests.pool import Pool
from tests.test_muon import against_plain

DIM, HEADS, HIDDEN = 16, 4, 24


class Attention(nn.Module):
    """Four heads, keys and values of two of them, and a gated MLP, both fused; nobody calls it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        rows = 3 * DIM if kind == "in_turn" else 2 * DIM
        self.num_heads, self.num_kv_heads = HEADS, HEADS if kind == "in_turn" else 2
        name = {"in_turn": "query_key_value", "grouped": "linear_qkv", "joined": "qkv_proj"}[kind]
        self.add_module(name, nn.Linear(DIM, rows, bias=False))
        self.gate_up_proj = nn.Linear(DIM, 2 * HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, DIM, bias=False)


def rows_of(kind: str) -> list[torch.Tensor]:
    """Which rows are queries, keys and values, written down head by head."""
    width = DIM // HEADS
    if kind == "joined":  # q q q q k k v v
        order = ["q"] * 4 + ["k"] * 2 + ["v"] * 2
    elif kind == "grouped":  # two heads, their key, their value, twice
        order = ["q", "q", "k", "v"] * 2
    else:  # a head, its key, its value
        order = ["q", "k", "v"] * 4
    each = [part for part in order for _ in range(width)]
    return [torch.tensor([i for i, part in enumerate(each) if part == wanted]) for wanted in "qkv"]


@pytest.mark.shows("X4")
@pytest.mark.parametrize("kind", ["joined", "in_turn", "grouped"])
def test_equals_muon_on_separate_projections(kind: str) -> None:
    torch.manual_seed(0)
    model = Attention(kind)
    name = next(name for name, _ in model.named_parameters())
    fused, gate_up = model.get_parameter(name), model.gate_up_proj.weight
    parts = rows_of(kind)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(fused)))
    apart = [nn.Parameter(fused.detach()[rows].clone()) for rows in parts]
    apart += [nn.Parameter(half.clone()) for half in gate_up.detach().chunk(2)]
    before = [parameter.detach().clone() for parameter in apart]
    again = [nn.Parameter(parameter.clone()) for parameter in before]
    ours = fxshard.Muon(lr=0.1, weight_decay=0.1).build(model)
    alone = fxshard.Muon(lr=0.1, weight_decay=0.1).build([(f"{i}.weight", p) for i, p in enumerate(apart)])
    torchs = torch.optim.Muon(again, lr=0.1, weight_decay=0.1, adjust_lr_fn="original")
    for _ in range(3):
        fused.grad, gate_up.grad = torch.randn_like(fused), torch.randn_like(gate_up)
        grads = [fused.grad[rows] for rows in parts] + list(gate_up.grad.chunk(2))
        for one, other, grad in zip(apart, again, grads, strict=True):
            one.grad, other.grad = grad.clone(), grad.clone()
        ours.step()
        alone.step()
        torchs.step()
    found = [fused.detach()[rows] for rows in parts] + list(gate_up.detach().chunk(2))
    for mine, separate, theirs, start in zip(found, apart, again, before, strict=True):
        assert torch.equal(mine, separate)
        assert (mine - theirs).norm() < 0.03 * (theirs - start).norm()
    assert set(ours.splits) == {name, "gate_up_proj.weight"}


def sharded(kind: str) -> list[str]:
    return [*against_plain(fxshard.Muon(), lambda: Attention(kind), zero=3, layout="rows")]


@pytest.mark.shows("X4")
@pytest.mark.parametrize("kind", ["grouped", "joined"])
def test_on_shards(ranks: Pool, kind: str) -> None:
    assert ranks(2, sharded, kind) == [[], []]


def test_one_word_turns_it_off_and_patterns_come_first() -> None:
    model = Attention("joined")
    assert fxshard.Muon(split="off").build(model).splits == {}
    given = fxshard.Muon(split={"*.weight": 1}).build(model)
    assert given.splits == {}
    one = fxshard.Muon(split={"qkv_proj.weight": (8, 16, 8)}).build(model)
    assert list(one.splits) == ["gate_up_proj.weight"]
    assert one._splits["qkv_proj.weight"] == fxshard.Split((8, 16, 8))
    with pytest.raises(fxshard.ConfigError, match="'auto', 'off'"):
        fxshard.Muon(split="none")


@pytest.mark.shows("X4")
def test_it_is_reported() -> None:
    model = fxshard.shard(nn.Sequential(Attention("joined"), Attention("joined")), optimizer=fxshard.Muon())
    report = str(model.report)
    assert "Muon: 0.qkv_proj.weight and 1 more cut by Split(parts=(16, 8, 8)" in report
    assert "gate and up, one after another" in report
    assert model.report.splits["1.gate_up_proj.weight"].split == fxshard.Split(2)


class Leaf(nn.Module):
    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"c_attn": (48, 16)}, fxshard.Split(3)),
        ({"wqkv": (24, 16)}, fxshard.Split((16, 4, 4))),
        ({"qkv_proj": (40, 16)}, "40 rows of 16"),
        ({"query_key_value": (48, 16)}, "how many heads"),
        ({"gate_up_proj": (4, 48, 16), "down_proj": (4, 16, 24)}, fxshard.Split(2)),
        ({"gate_up_proj": (4, 16, 48), "down_proj": (4, 24, 16)}, "columns are gate and up"),
        ({"gate_up_proj": (48, 16)}, "no down_proj"),
        ({"linear_fc1": (48, 16), "linear_fc2": (16, 48)}, None),  # no gate
        ({"linear_fc1": (48, 16), "linear_fc2": (16, 24)}, fxshard.Split(2)),
        ({"in_proj": (48, 16)}, None),  # of a state-space layer, perhaps
        ({"q_proj": (48, 16), "up": (48, 16)}, None),
    ],
)
def test_what_names_and_shapes_say(shapes: dict[str, tuple[int, ...]], expected: Any) -> None:
    found = find_fused(Leaf(**shapes)).get(next(iter(shapes)))
    if isinstance(expected, str):
        assert found is not None and found.split is None and expected in found.why
    else:
        assert (found.split if found is not None else None) == expected


# -- models of transformers: the rows that are said to be values are values --------------------------------------------

SMALL = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def falcon(**options: Any) -> Callable[[Any], nn.Module]:
    return lambda hf: hf.FalconForCausalLM(hf.FalconConfig(**SMALL, bias=False, alibi=False, **options))


MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "gpt_neox": lambda hf: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SMALL, intermediate_size=48)),
    "bloom": lambda hf: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=32, hidden_size=32, n_layer=1, n_head=4)),
    "falcon one key": falcon(multi_query=True, new_decoder_architecture=False),
    "falcon grouped": falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon heads": falcon(multi_query=False, new_decoder_architecture=False),
    "phi3": lambda hf: hf.Phi3ForCausalLM(
        hf.Phi3Config(**SMALL, intermediate_size=48, num_key_value_heads=2, pad_token_id=0)
    ),
    "gpt_bigcode one key": lambda hf: hf.GPTBigCodeForCausalLM(
        hf.GPTBigCodeConfig(vocab_size=32, n_embd=32, n_layer=1, n_head=4, multi_query=True)
    ),
    "gpt_bigcode": lambda hf: hf.GPTBigCodeForCausalLM(
        hf.GPTBigCodeConfig(vocab_size=32, n_embd=32, n_layer=1, n_head=4, multi_query=False)
    ),
}


def attention_output(model: nn.Module, owner: nn.Module) -> float:
    """By how much the outputs of the module around a fused weight differ for two inputs; Bloom's adds its residual."""
    seen: list[torch.Tensor] = []

    def note(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        residual = kwargs.get("residual", args[1] if type(module).__name__ == "BloomAttention" else 0)
        seen.append((out[0] if isinstance(out, tuple) else out) - residual)

    handle = owner.register_forward_hook(note, with_kwargs=True)
    with torch.no_grad():
        for seed in (0, 1):
            model(torch.randint(32, (1, 6), generator=torch.Generator().manual_seed(seed)), use_cache=False)
    handle.remove()
    return (seen[0] - seen[1]).abs().max().item()


@pytest.mark.shows("X4")
@pytest.mark.parametrize("name", MODELS)
def test_the_rows_of_models_of_transformers(name: str) -> None:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = MODELS[name](hf).eval()
    found = {path: one for path, one in find_fused(model).items() if "gate_up" not in path}
    assert len(found) == 1 and all(one.split is not None for one in found.values()), found
    ((path, one),) = found.items()
    fused = model.get_parameter(path)
    split = one.split
    assert split is not None
    parts = split.parts if isinstance(split.parts, tuple) else (len(fused) // split.parts // split.groups,) * 3
    which = torch.repeat_interleave(torch.arange(3), torch.tensor(parts)).repeat(split.groups)
    owner = model.get_submodule(path.rpartition(".")[0].rpartition(".")[0])
    without = []
    for part in range(3):
        kept = fused.detach().clone()
        with torch.no_grad():
            fused[which == part] = 0
            without.append(attention_output(model, owner))
            fused.copy_(kept)
    assert without[2] < 1e-6 < min(without[:2]), without


def test_the_halves_of_phi3() -> None:
    hf = pytest.importorskip("transformers")
    model = MODELS["phi3"](hf)
    path, found = next((path, one) for path, one in find_fused(model).items() if "gate_up" in path)
    assert found.split == fxshard.Split(2)
    mlp = model.get_submodule(path.rpartition(".")[0].rpartition(".")[0])
    weight = model.get_parameter(path).detach()
    for half in range(2):
        kept = weight.clone()
        weight.chunk(2)[half].zero_()
        assert mlp(torch.randn(2, 32)).abs().max() == 0
        weight.copy_(kept)


def test_columns_of_gpt2_are_left_whole() -> None:
    hf = pytest.importorskip("transformers")
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=32, n_embd=32, n_layer=1, n_head=4))
    ((_, found),) = find_fused(model).items()
    assert found.split is None and "columns" in found.why
