"""Weights that fused attention never writes out, against softmax written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sonde.probes import AttentionCalls, Choice, explain_attention, explain_module, find_returned, head_statistics

BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 4, 5, 7, 8


def by_hand(query, key, mask, scale):
    """Softmax one row at a time, in float64."""
    weights = torch.zeros(*query.shape[:-1], key.shape[-2], dtype=torch.float64)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            for i in range(query.shape[2]):
                scores = [float(query[b, h, i].double() @ k.double()) * scale for k in key[b, h]]
                scores = [s + float(mask[b, h, i, j]) for j, s in enumerate(scores)]
                if all(s == -math.inf for s in scores):
                    continue
                exps = [math.exp(s) for s in scores]
                weights[b, h, i] = torch.tensor([e / sum(exps) for e in exps], dtype=torch.float64)
    return weights


def masks(queries=QUERIES, keys=KEYS):
    torch.manual_seed(1)
    keep = torch.rand(BATCH, 1, queries, keys) > 0.4
    keep[..., 0] = True
    nowhere = keep.clone()
    nowhere[0, 0, 2] = False
    return {
        "no mask": None,
        "yes and no": keep,
        "yes and no, two axes": keep[0, 0],
        "a row that may look nowhere": nowhere,
        "added values": torch.randn(BATCH, HEADS, queries, keys),
        "added values for all heads": torch.randn(1, 1, queries, keys),
        "added minus infinity": torch.zeros(queries, keys).masked_fill(~keep[0, 0], -math.inf),
    }


@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize("mask", masks().values(), ids=masks().keys())
def test_every_kind_of_mask_gives_the_softmax_written_out(mask, scale):
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(BATCH, HEADS, QUERIES, WIDTH),
        torch.randn(BATCH, HEADS, KEYS, WIDTH),
        torch.randn(BATCH, HEADS, KEYS, WIDTH),
    )
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    found = explain_attention(query, key, value, mask, scale=scale, output=output)
    added = torch.zeros(1) if mask is None else mask
    if added.dtype == torch.bool:
        added = torch.zeros(added.shape).masked_fill(~added, -math.inf)
    added = added.expand(BATCH, HEADS, QUERIES, KEYS)
    expected = by_hand(query, key, added, scale or 1 / math.sqrt(WIDTH))
    torch.testing.assert_close(found.weights.double(), expected, rtol=1e-4, atol=1e-6)
    assert found.max_difference.shape == (BATCH,)
    assert found.max_difference.max() < 1e-5


@pytest.mark.parametrize("queries", [KEYS, 3, 9])
def test_causal_attention_is_aligned_at_the_first_key(queries):
    query, key, value = (torch.randn(BATCH, HEADS, n, WIDTH) for n in (queries, KEYS, KEYS))
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    found = explain_attention(query, key, value, is_causal=True, output=output)
    allowed = torch.ones(queries, KEYS, dtype=torch.bool).tril()
    added = torch.zeros(queries, KEYS).masked_fill(~allowed, -math.inf).expand(BATCH, HEADS, -1, -1)
    torch.testing.assert_close(
        found.weights.double(), by_hand(query, key, added, 1 / math.sqrt(WIDTH)), rtol=1e-4, atol=1e-6
    )
    assert found.max_difference.max() < 1e-5


def test_grouped_heads_share_their_keys():
    query, key, value = (torch.randn(BATCH, heads, KEYS, WIDTH) for heads in (HEADS, 2, 2))
    output = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    found = explain_attention(query, key, value, enable_gqa=True, output=output)
    expected = by_hand(query, key.repeat_interleave(2, 1), torch.zeros(BATCH, HEADS, KEYS, KEYS), 1 / math.sqrt(WIDTH))
    torch.testing.assert_close(found.weights.double(), expected, rtol=1e-4, atol=1e-6)
    assert found.max_difference.max() < 1e-5


def test_a_causal_bias_object_is_a_mask_too():
    from torch.nn.attention.bias import causal_lower_right

    query, key, value = (torch.randn(BATCH, HEADS, n, WIDTH) for n in (3, KEYS, KEYS))
    with AttentionCalls() as calls:
        F.scaled_dot_product_attention(query, key, value, attn_mask=causal_lower_right(3, KEYS))
    assert calls.seen[0].max_difference.max() < 1e-5
    assert calls.seen[0].weights[0, 0, 0, -2:].tolist() == [0.0, 0.0]


def test_a_part_is_the_same_part_of_the_whole_and_is_checked_too():
    query, key, value = (torch.randn(BATCH, HEADS, KEYS, WIDTH) for _ in range(3))
    mask = torch.randn(BATCH, HEADS, KEYS, KEYS)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    whole = explain_attention(query, key, value, mask, output=output)
    part = explain_attention(query, key, value, mask, output=output, choice=Choice(heads=[2, 0], rows=[4]))
    torch.testing.assert_close(part.weights, whole.weights[:, [2, 0]][:, :, [4]])
    assert part.max_difference.max() < 1e-5


def test_a_wrong_output_is_noticed():
    query, key, value = (torch.randn(BATCH, HEADS, KEYS, WIDTH) for _ in range(3))
    output = F.scaled_dot_product_attention(query, key, value)
    output[1, 0, 0, 0] += 1
    difference = explain_attention(query, key, value, output=output).max_difference
    assert difference[0] < 1e-5
    assert difference[1] == pytest.approx(1, abs=1e-4)


def test_with_dropout_there_is_nothing_to_check_against():
    query, key, value = (torch.randn(BATCH, HEADS, KEYS, WIDTH) for _ in range(3))
    with AttentionCalls() as calls:
        F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    assert calls.seen[0].max_difference is None
    torch.testing.assert_close(calls.seen[0].weights.sum(-1), torch.ones(BATCH, HEADS, KEYS))


def test_half_precision_is_written_out_in_single():
    query, key, value = (torch.randn(BATCH, HEADS, KEYS, WIDTH).bfloat16() for _ in range(3))
    output = F.scaled_dot_product_attention(query, key, value)
    found = explain_attention(query, key, value, output=output)
    assert found.weights.dtype == torch.float32
    assert found.max_difference.max() < 0.05


@pytest.mark.parametrize("rank", [2, 3])
def test_attention_without_batch_or_heads_has_one_of_each(rank):
    query, key, value = (torch.randn(BATCH, KEYS, WIDTH)[(0,) * (3 - rank)] for _ in range(3))
    output = F.scaled_dot_product_attention(query, key, value)
    found = explain_attention(query, key, value, output=output)
    assert found.weights.shape == ((BATCH if rank == 3 else 1), 1, KEYS, KEYS)
    assert found.max_difference.max() < 1e-5


def test_calls_are_seen_without_changing_what_they_return():
    query, key, value = (torch.randn(BATCH, HEADS, KEYS, WIDTH, requires_grad=True) for _ in range(3))
    expected = F.scaled_dot_product_attention(query, key, value)
    with AttentionCalls() as calls:
        found = F.scaled_dot_product_attention(query, key, value)
    assert torch.equal(found, expected)
    assert found.requires_grad
    assert not calls.seen[0].weights.requires_grad


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask_kind", ["none", "causal", "padding", "both", "float"])
@pytest.mark.parametrize("options", [{}, {"add_zero_attn": True}, {"add_bias_kv": True}, {"kdim": 12, "vdim": 20}])
def test_multi_head_modules_give_their_weights_although_not_asked(batch_first, mask_kind, options):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, batch_first=batch_first, **options).eval()
    query = torch.randn(3, 6, 16)
    key, value = torch.randn(3, 6, options.get("kdim", 16)), torch.randn(3, 6, options.get("vdim", 16))
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[:, -2:] = True
    named = {
        "none": {},
        "causal": {"attn_mask": causal, "is_causal": True},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": causal, "key_padding_mask": padding},
        "float": {"attn_mask": torch.randn(6, 6)},
    }[mask_kind]
    args = (query, key, value) if batch_first else tuple(t.transpose(0, 1) for t in (query, key, value))
    with torch.no_grad():
        output = module(*args, need_weights=False, **named)
        _, expected = module(*args, need_weights=True, average_attn_weights=False, **named)
    found = explain_module(module, args, {"need_weights": False, **named}, output, Choice())
    torch.testing.assert_close(found.weights, expected)
    assert found.max_difference.shape == (3,)
    if mask_kind == "causal" and ({"add_zero_attn", "add_bias_kv"} & options.keys()):
        # With the hint, torch lets no query see the added key; with weights wanted, it does. The difference says so.
        assert found.max_difference.max() > 1e-3
    else:
        assert found.max_difference.max() < 1e-5


def test_a_multi_head_module_takes_its_fast_path_all_the_same():
    module = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.randn(3, 6, 16)
    with torch.no_grad():
        output = module(x, x, x, need_weights=False)
    assert explain_module(module, (x, x, x), {}, output, Choice()).max_difference.max() < 1e-5


def test_an_unbatched_multi_head_call_is_a_batch_of_one():
    module = nn.MultiheadAttention(16, 4).eval()
    x = torch.randn(6, 16)
    output = module(x, x, x)
    found = explain_module(module, (x, x, x), {}, output, Choice(heads=[1]))
    assert found.weights.shape == (1, 1, 6, 6)
    assert found.max_difference.item() < 1e-5


def test_a_multi_head_module_inside_a_block_is_seen():
    block = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    x = torch.randn(3, 6, 16)
    with AttentionCalls() as calls, torch.no_grad():
        block(x)
    assert [attention.weights.shape for attention in calls.seen] == [(3, 4, 6, 6)]
    assert calls.seen[0].max_difference.max() < 1e-5


def test_returned_weights_are_recognised_by_their_sums():
    weights = torch.softmax(torch.randn(2, 4, 5, 5), -1)
    assert find_returned([torch.randn(2, 5, 8), weights]).equal(weights)
    assert find_returned([weights[:, 0]]).shape == (2, 1, 5, 5)
    assert find_returned([torch.randn(2, 5, 8), torch.zeros(2, 3), torch.ones(2, 3, 1)]) is None
    assert find_returned([torch.arange(6).reshape(2, 3)]) is None


def test_entropy_and_peak_of_known_heads():
    uniform = torch.full((1, 1, 4, 4), 0.25)
    sharp = torch.eye(4)[None, None]
    stats = head_statistics(torch.cat([uniform, sharp], 1))
    torch.testing.assert_close(stats["entropy"], torch.tensor([[math.log(4), 0.0]]))
    torch.testing.assert_close(stats["peak"], torch.tensor([[0.25, 1.0]]))


def test_rows_that_look_nowhere_do_not_count():
    weights = torch.full((1, 1, 4, 4), 0.25)
    weights[0, 0, 1:3] = 0
    assert head_statistics(weights)["peak"].item() == 0.25
    assert head_statistics(weights)["entropy"].item() == pytest.approx(math.log(4))
