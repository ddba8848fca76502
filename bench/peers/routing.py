#!/usr/bin/env python3
"""The routing stages of public libraries, timed beside Shunt's on the same GPU, in the same run.

    python3 bench/peers/routing.py --shunt build/cuda/bin/shunt --json routing.json --table routing.md

Runs `shunt bench all --grid --device cuda`, then each peer that can be imported on the same cases: README.md beside
this says which, and how they are timed. A peer's result is compared with PyTorch in f32 first; one that is wrong, or
refuses a shape, is named in "failed" and has no time.
"""
import argparse
import importlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

for folder in filter(None, os.environ.get('PEERS_SITE', '').split(':')):
    sys.path[:0] = [folder, folder + '/nvidia_cutlass_dsl/dsl_packages']
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
import table  # noqa: E402  bench/table.py
from versions import version  # noqa: E402  bench/peers/versions.py

import torch  # noqa: E402

DTYPES = {'f32': torch.float32, 'bf16': torch.bfloat16, 'f16': torch.float16}
I32 = torch.int32


# ---- timing --------------------------------------------------------------------------------------

def variants(row, rotate_bytes):
    """Copies of a case's tensors, as shunt bench has them: past rotate_bytes, 8 to 256."""
    wanted = min(max(math.ceil(rotate_bytes / max(row['bytes'], 1)), 8), 256)
    return max(min(wanted, int(16e9 // max(row['bytes'], 1))), 2)


def graph_us(calls, seconds):
    """Microseconds a call: at least 64 calls in a CUDA graph, the median of nine samples of several replays."""
    rounds = max(1, math.ceil(64 / len(calls)))
    results = [None] * len(calls)  # kept, so that what a call allocates rotates too, as our outputs do
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for i, call in enumerate(calls):
                    results[i] = call()
        count = rounds * len(calls)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def sample(replays):
            begin.record(stream)
            for _ in range(replays):
                graph.replay()
            end.record(stream)
            end.synchronize()
            return 1e3 * begin.elapsed_time(end) / replays / count

        sample(2)
        one = max(sample(2), 0.01) * count
        replays = min(max(int(1e6 * seconds / 9 / one), 1), 1000)
        return sorted(sample(replays) for _ in range(9))[4]


def eager_us(calls):
    """Microseconds a call, launched one by one from Python: the median of five rounds."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        begin.record()
        for i in range(32):
            calls[i % len(calls)]()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / 32)
    return sorted(times[1:])[2]


# ---- what is there -------------------------------------------------------------------------------

def load_vllm():
    """vLLM's routing operators: its library of them, without the rest of vLLM, which takes long to import."""
    found = importlib.util.find_spec('vllm')
    if found is None:
        raise ImportError('there is no package vllm')
    libraries = [path for folder in found.submodule_search_locations for path in Path(folder).glob('_moe_C*.so')]
    for path in libraries:
        torch.ops.load_library(str(path))
    if not hasattr(torch.ops._moe_C, 'topk_softmax'):
        raise ImportError(f'vllm has no _moe_C.topk_softmax: {libraries}')
    return torch.ops._moe_C


def load_sglang():
    """SGLang's operators: the package, or its library of operators alone."""
    for folder in filter(None, os.environ.get('PEERS_SITE', '').split(':')):
        library = Path(folder) / 'sgl_common_ops.abi3.so'
        if library.exists():
            torch.ops.load_library(str(library))
            return torch.ops.sgl_kernel
    importlib.import_module('sgl_kernel')
    return torch.ops.sgl_kernel


def load_fbgemm():
    importlib.import_module('fbgemm_gpu.experimental.gen_ai')
    return torch.ops.fbgemm


def load_flashinfer():
    """FlashInfer's gate by name of its backend: of the package, or of its libraries alone, built from its csrc."""
    libraries = {}
    for folder in filter(None, os.environ.get('PEERS_SITE', '').split(':')):
        for backend in ('default', 'cake'):
            path = Path(folder) / f'flashinfer_fused_routing_{backend}.so'
            if path.exists():
                libraries[backend] = importlib.import_module('tvm_ffi').load_module(str(path)).NoAuxTc
    if libraries:
        return libraries
    gate = importlib.import_module('flashinfer.fused_moe').fused_topk_deepseek
    return {backend: lambda *arguments, of=backend: gate(*arguments, backend=of) for backend in ('default', 'cake')}


LOADERS = {
    'vllm': (load_vllm, 'vllm'),
    'sglang': (load_sglang, 'sglang-kernel'),
    'quack': (lambda: importlib.import_module('quack.topk').topk_fwd, 'quack-kernels'),
    'flashinfer': (load_flashinfer, 'flashinfer-python'),
    'fbgemm': (load_fbgemm, 'fbgemm-gpu-genai'),
}


def load(wanted):
    found, versions = {}, {'torch': torch.__version__}
    for name, (loader, package) in LOADERS.items():
        if wanted and name not in wanted:
            continue
        try:
            found[name] = loader()
            versions[name] = version(package)
        except Exception as error:  # a package that is there may still not load here
            print(f'-- {name}: not timed: {str(error)[:160]}', flush=True)
    return found, versions


# ---- references ----------------------------------------------------------------------------------

def dense(ids, weights, experts):
    return torch.zeros(ids.shape[0], experts, device='cuda').scatter_(1, ids.long(), weights.float())


def compare_choice(got, want, experts, allowed):
    """Weights at their experts; near ties may go the other way in a share `allowed` of the rows."""
    ids, weights = got
    if ids.min() < 0 or ids.max() >= experts:
        raise AssertionError('an id out of range')
    off = (dense(ids, weights, experts) - dense(*want, experts)).abs().amax(1) > 1e-2
    if off.sum().item() > allowed * len(off):
        raise AssertionError(f'{off.sum().item()} of {len(off)} rows are wrong')


def compare_top(got, logits, k):
    """The k best logits and a softmax over them; equal logits may go either way."""
    ids, weights = got
    expect(ids.min() >= 0 and ids.max() < logits.shape[1], 'an id out of range')
    want = logits.float().topk(k, -1)[0]
    chosen = logits.float().gather(1, ids.long())
    expect((ids.sort(-1)[0].diff(dim=-1) != 0).all(), 'an id occurs twice in a row')
    expect(torch.equal(chosen.sort(-1, descending=True)[0], want), 'not the best logits')
    expect((weights.float() - chosen.softmax(-1)).abs().max() < 1e-2, 'the weights are wrong')


def compare(got, want, tolerance):
    error = ((got.float() - want).norm() / want.norm()).item()
    if not error <= tolerance:
        raise AssertionError(f'relative error {error:.3g}')


def expect(truth, what):
    if not bool(truth):
        raise AssertionError(what)


def top_softmax(logits, k):
    values, ids = logits.topk(k, -1)
    return ids, values.float().softmax(-1)


def biased_groups(logits, bias, groups, keep, k):
    """DeepSeek-V3's rule, as its own code has it."""
    scores = logits.float().sigmoid()
    choice = scores + bias
    by_group = choice.view(len(logits), groups, -1)
    best = by_group.topk(2, -1)[0].sum(-1).topk(keep, -1)[1]
    mask = torch.zeros(len(logits), groups, device='cuda').scatter_(1, best, 1).unsqueeze(-1).bool()
    ids = by_group.masked_fill(~mask, -math.inf).flatten(1).topk(k, -1)[1]
    weights = scores.gather(1, ids)
    return ids, weights / weights.sum(-1, keepdim=True)


def order_of(ids, experts):
    """offsets, permutation and inverse of ids, by a stable sort."""
    flat = ids.flatten()
    ranked, permutation = flat.sort(stable=True)
    offsets = torch.searchsorted(ranked, torch.arange(experts + 1, device='cuda', dtype=ranked.dtype))
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(len(flat), device='cuda')
    return offsets.to(I32), permutation.to(I32), inverse.to(I32)


def valid_order(offsets, inverse, ids, experts):
    """Any order within an expert will do; each pair's row must be one of its expert's."""
    flat, rows = ids.flatten().long(), inverse.flatten().long()
    want = torch.bincount(flat, minlength=experts).cumsum(0)
    expect((offsets[1:experts + 1].long() == want).all(), 'offsets are wrong')
    expect(rows.unique().numel() == rows.numel(), 'rows repeat')
    expect(((rows >= offsets.long()[flat]) & (rows < offsets.long()[flat + 1])).all(), 'rows of other experts')


# ---- the cases -----------------------------------------------------------------------------------

def shape_of(row):
    """The numbers of a case's name: T, E, k, H, R, I, EP, g (groups), keep, tile."""
    shape = {key: int(value) for key, value in re.findall(r'\b(EP|[TEkHRI])(\d+)\b', row['case'])}
    if found := re.search(r'\bg(\d+)/(\d+)', row['case']):
        shape['g'], shape['keep'] = int(found[1]), int(found[2])
    if found := re.search(r'tile (\d+)', row['case']):
        shape['tile'] = int(found[1])
    return shape


class Peer:
    """A way to compute a case: call(i) on variant i, check() of call(0), and what else to time it by."""

    def __init__(self, name, call, check, eager=False, compiled=None):
        self.name, self.call, self.check = name, call, check
        self.eager = eager          # time it launched one by one too
        self.compiled = compiled    # the same for torch.compile: a function and its arguments by i


def with_outputs(tokens, k, n, dtype=torch.float32):
    return [(torch.empty(tokens, k, device='cuda', dtype=dtype), torch.empty(tokens, k, device='cuda', dtype=I32),
             torch.empty(tokens, k, device='cuda', dtype=I32)) for _ in range(n)]


def topk_softmax_peers(logits_of, shape, n, have, prefix=''):
    """Fused top-k and softmax kernels over logits_of(i); `prefix` names what makes the logits."""
    tokens, k = shape['T'], shape['k']
    out = with_outputs(tokens, k, n)
    peers = []

    def add(name, call, result):
        peers.append((prefix + name, call, result))

    if 'sglang' in have:
        def sglang(i):
            have['sglang'].topk_softmax(out[i][0], out[i][1], logits_of(i), True, 0.0, None)
        add('sglang topk_softmax', sglang, lambda: (out[0][1], out[0][0]))
    if 'vllm' in have:
        def vllm(i):
            have['vllm'].topk_softmax(out[i][0], out[i][1], out[i][2], logits_of(i), True, None)
        add('vllm topk_softmax', vllm, lambda: (out[0][1], out[0][0]))
    if 'quack' in have:
        add('quack topk', lambda i: have['quack'](logits_of(i), k, True), lambda: have['quack'](logits_of(0), k, True)[::-1])
    return peers


def route_peers(row, n, have):
    shape, dtype = shape_of(row), DTYPES[row['dtype']]
    tokens, experts, k, hidden = (shape[key] for key in 'TEkH')
    x = [torch.randn(tokens, hidden, device='cuda', dtype=dtype) for _ in range(n)]
    w = [torch.randn(experts, hidden, device='cuda', dtype=dtype) / math.sqrt(hidden) for _ in range(n)]
    want = top_softmax(x[0].float() @ w[0].float().T, k)

    def check(result):
        # Logits that are rounded to 16 bits tie more often.
        return lambda: compare_choice(result(), want, experts, 0.05)

    def plain(a, b):
        return top_softmax(torch.nn.functional.linear(a, b), k)

    yield Peer('torch', lambda i: plain(x[i], w[i]), check(lambda: plain(x[0], w[0])), eager=True,
               compiled=(plain, lambda i: (x[i], w[i])))
    linear = [None] * n

    def cublas(i):
        linear[i] = torch.nn.functional.linear(x[i], w[i])
        return linear[i]

    for name, call, result in topk_softmax_peers(cublas, shape, n, have, 'linear + '):
        yield Peer(name, call, check(lambda call=call, result=result: (call(0), result())[1]))
    if hidden == 7168 and tokens <= 16 and experts == 256:
        half = [(a.bfloat16(), b.bfloat16(), torch.empty(tokens, experts, device='cuda')) for a, b in zip(x, w)]
        for name in ('vllm', 'sglang'):
            if name not in have:
                continue

            def router(i, ops=have[name]):
                ops.dsv3_router_gemm(half[i][2], half[i][0], half[i][1])
                return half[i][2]

            for tail, call, result in topk_softmax_peers(router, shape, n, {name: have[name]}, f'{name} dsv3_router_gemm + '):
                yield Peer(tail.replace(f'+ {name} ', '+ '), call, check(lambda call=call, result=result: (call(0), result())[1]))


def gate_peers(row, n, have):
    shape, dtype = shape_of(row), DTYPES[row['dtype']]
    tokens, experts, k = (shape[key] for key in 'TEk')
    x = [torch.randn(tokens, experts, device='cuda', dtype=dtype) for _ in range(n)]
    if 'g' not in shape:
        yield Peer('torch', lambda i: top_softmax(x[i], k), lambda: compare_top(top_softmax(x[0], k), x[0], k), eager=True,
                   compiled=(top_softmax, lambda i: (x[i], k)))
        for name, call, result in topk_softmax_peers(lambda i: x[i], shape, n, have):
            yield Peer(name, call, lambda call=call, result=result: (call(0), compare_top(result(), x[0], k)))
        return
    groups, keep = shape['g'], shape['keep']
    bias = torch.randn(experts, device='cuda') * 0.1
    want = biased_groups(x[0], bias, groups, keep, k)

    def check(result):
        return lambda: compare_choice(result(), want, experts, 0.001 if tokens > 1000 else 0)

    yield Peer('torch', lambda i: biased_groups(x[i], bias, groups, keep, k), check(lambda: want), eager=True,
               compiled=(biased_groups, lambda i: (x[i], bias, groups, keep, k)))
    if 'sglang' in have:
        def sglang(i):
            weights, ids = have['sglang'].moe_fused_gate(x[i], bias, groups, keep, k, 0, 1.0, False)
            return ids, weights
        yield Peer('sglang moe_fused_gate', sglang, check(lambda: sglang(0)))
    if 'vllm' in have:
        def vllm(i):
            weights, ids = have['vllm'].grouped_topk(x[i], groups, keep, k, True, 1.0, bias, 1)
            return ids, weights
        yield Peer('vllm grouped_topk', vllm, check(lambda: vllm(0)))
    if 'flashinfer' in have:
        out = [(torch.empty(tokens, k, device='cuda'), torch.empty(tokens, k, device='cuda', dtype=I32)) for _ in range(n)]

        for backend, gate in have['flashinfer'].items():
            def flashinfer(i, gate=gate):
                gate(x[i], bias, groups, keep, k, 1.0, *out[i], False, None)  # no dependent launch, like all others
                return out[i][::-1]
            name = 'flashinfer fused_topk_deepseek' + ('' if backend == 'default' else f', {backend}')
            yield Peer(name, flashinfer, check(lambda call=flashinfer: call(0)))


def random_ids(tokens, experts, k):
    return torch.rand(tokens, experts, device='cuda').topk(k, -1)[1].to(I32)


def order_peers(row, n, have):
    shape = shape_of(row)
    tokens, experts, k = (shape[key] for key in 'TEk')
    ids = [random_ids(tokens, experts, k) for _ in range(n)]
    pairs = tokens * k
    if 'tile' not in shape:
        def check():
            offsets, _, inverse = order_of(ids[0], experts)
            valid_order(offsets, inverse, ids[0], experts)
        yield Peer('torch', lambda i: order_of(ids[i], experts), check, eager=True, compiled=(order_of, lambda i: (ids[i], experts)))
        if 'sglang' in have:
            # Its offsets leave out the last one in older versions: room for all.
            out = [tuple(torch.zeros(size, device='cuda', dtype=I32)
                         for size in (experts + 1, experts * 3, experts * 3, pairs, pairs)) for _ in range(n)]

            def sglang(i):
                offsets, sizes, sizes2, rows, inverse = out[i]
                have['sglang'].prepare_moe_input(ids[i], offsets, None, sizes.view(-1, 3), sizes2.view(-1, 3), rows, inverse,
                                                 experts, 128, 128)

            def check_sglang():
                sglang(0)
                valid_order(out[0][0], out[0][4], ids[0], experts)
            yield Peer('sglang prepare_moe_input', sglang, check_sglang)
        return
    tile = shape['tile']
    most = pairs + experts * (tile - 1)
    out = [(torch.empty(most, device='cuda', dtype=I32), torch.empty(-(-most // tile), device='cuda', dtype=I32),
            torch.empty(1, device='cuda', dtype=I32), torch.empty(experts + 2, device='cuda', dtype=I32)) for _ in range(n)]

    def check_tiles(call):
        def check():
            call(0)
            count = torch.bincount(ids[0].flatten(), minlength=experts)
            rows = ((count + tile - 1) // tile * tile).sum().item()
            expect(out[0][2].item() == rows, 'the number of rows is wrong')
            used = out[0][0][:rows].long()
            used = used[used < pairs]
            expect(used.numel() == pairs and used.unique().numel() == pairs, 'pairs are missing')
        return check

    if 'sglang' in have:
        def sglang_tiles(i):
            sorted_ids, of_tiles, total, sums = out[i]
            have['sglang'].moe_align_block_size(ids[i], experts + 1, tile, sorted_ids, of_tiles, total, sums, True)
        yield Peer('sglang moe_align_block_size', sglang_tiles, check_tiles(sglang_tiles))
    if 'vllm' in have:
        def vllm_tiles(i):
            sorted_ids, of_tiles, total, _ = out[i]
            have['vllm'].moe_align_block_size(ids[i], experts, tile, sorted_ids, of_tiles, total, None)
        yield Peer('vllm moe_align_block_size', vllm_tiles, check_tiles(vllm_tiles))


def shuffle_peers(row, n, have):
    shape, dtype = shape_of(row), DTYPES[row['dtype']]
    tokens, experts, k = (shape[key] for key in 'TEk')
    scores = [torch.randn(tokens, experts, device='cuda', dtype=dtype) for _ in range(n)]

    def shuffled(given):
        values, ids = given.topk(k, -1)
        return ids, values.float(), *order_of(ids, experts)

    def plain(i):
        return shuffled(scores[i])

    def check():
        ids, _, offsets, _, inverse = plain(0)
        valid_order(offsets, inverse, ids, experts)
    yield Peer('torch', plain, check, eager=True, compiled=(shuffled, lambda i: (scores[i],)))
    if 'fbgemm' in have:
        def fbgemm(i):
            return have['fbgemm'].index_shuffling(scores[i], top_k=k)

        def check_fbgemm():
            counts = fbgemm(0)[0][:experts].long()
            best = scores[0].topk(k, -1)[0].float().sum()
            expect(counts.sum().item() == tokens * k, 'counts are wrong')
            rows, experts_of = fbgemm(0)[2].long(), fbgemm(0)[1].long()
            compare(scores[0][rows, experts_of].float().sum(), best, 1e-2)
        yield Peer('fbgemm index_shuffling', fbgemm, check_fbgemm)


def rows_case(row, n):
    """Hidden states, rows, and an order of random ids, for gather and combine."""
    shape, dtype = shape_of(row), DTYPES[row['dtype']]
    tokens, pairs, hidden = (shape[key] for key in 'TRH')
    k = pairs // tokens
    experts = max(128, k)
    orders = [order_of(random_ids(tokens, experts, k), experts) for _ in range(min(n, 8))]
    return tokens, pairs, hidden, k, dtype, orders


def gather_peers(row, n, have):
    tokens, pairs, hidden, k, dtype, orders = rows_case(row, n)
    x = [torch.randn(tokens, hidden, device='cuda', dtype=dtype) for _ in range(n)]
    out = [torch.empty(pairs, hidden, device='cuda', dtype=dtype) for _ in range(n)]
    of = [(order[1] // k).contiguous() for order in orders]

    def check(call):
        def checked():
            call(0)
            expect(torch.equal(out[0], x[0][of[0].long()]), 'rows differ')
        return checked

    def plain(i):
        torch.index_select(x[i], 0, of[i % len(of)], out=out[i])
    yield Peer('torch index_select', plain, check(plain), eager=True)
    for name in ('sglang', 'vllm'):
        if name in have:
            def shuffled(i, ops=have[name]):
                ops.shuffle_rows(x[i], of[i % len(of)], out[i])
            yield Peer(f'{name} shuffle_rows', shuffled, check(shuffled))


def swiglu_to_fp8(x, block):
    """SwiGLU of rows of gate and up, in fp8 with a scale for `block` columns."""
    gate, up = x.float().chunk(2, -1)
    h = torch.nn.functional.silu(gate) * up
    parts = h.view(h.shape[0], -1, block)
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (parts / scale).to(torch.float8_e4m3fn).view(h.shape), scale.squeeze(-1)


def activate_peers(row, n, have):
    shape, dtype = shape_of(row), DTYPES[row['dtype']]
    rows, width = shape['R'], shape['I']
    x = [torch.randn(rows, 2 * width, device='cuda', dtype=dtype) for _ in range(n)]
    few = min(rows, 512)
    want = torch.nn.functional.silu(x[0][:few, :width].float()) * x[0][:few, width:].float()
    block = {'fp8_block': 128, 'fp8_token': width}.get(row['case'].split()[-1])
    if block is not None and width % block == 0:
        def rounded(i):
            return swiglu_to_fp8(x[i], block)

        def check_rounded():
            values, scales = rounded(0)
            parts = values[:few].float().view(few, -1, block) * scales[:few, :, None]
            compare(parts.view(few, width), want, 0.07)
        yield Peer('torch silu, mul, amax, to', rounded, check_rounded, eager=True,
                   compiled=(lambda t: swiglu_to_fp8(t, block), lambda i: (x[i],)))
        return

    def plain(i):
        return torch.nn.functional.silu(x[i][:, :width]) * x[i][:, width:]
    yield Peer('torch silu, mul', plain, lambda: compare(plain(0)[:few], want, 2e-2), eager=True,
               compiled=(lambda t: torch.nn.functional.silu(t[:, :width].float()).mul(t[:, width:]).to(t.dtype),
                         lambda i: (x[i],)))


def combine_peers(row, n, have):
    tokens, pairs, hidden, k, dtype, orders = rows_case(row, n)
    rows = [torch.randn(pairs, hidden, device='cuda', dtype=dtype) for _ in range(n)]
    weights = [torch.rand(tokens, k, device='cuda', dtype=torch.float32) for _ in range(n)]
    half = [w.to(dtype) for w in weights]
    inverse = [order[2].view(tokens, k) for order in orders]
    token_of = [(order[1] // k).contiguous() for order in orders]
    out = [torch.empty(tokens, hidden, device='cuda', dtype=dtype) for _ in range(n)]
    few = min(tokens, 512)
    want = (rows[0][inverse[0][:few].flatten().long()].float().view(few, k, hidden) * weights[0][:few, :, None]).sum(1)

    def check(call):
        return lambda: compare(call(0)[:few], want, 1e-2)

    def batched(i):
        taken = rows[i].index_select(0, inverse[i % len(inverse)].flatten()).view(tokens, k, hidden)
        return torch.bmm(half[i].unsqueeze(1), taken).squeeze(1)
    yield Peer('torch index_select + bmm', batched, check(batched), eager=True,
               compiled=(lambda r, inv, w: (r[inv.long()].float() * w.unsqueeze(-1)).sum(1).to(r.dtype),
                         lambda i: (rows[i], inverse[i % len(inverse)], weights[i])))
    by_row = [half[i].flatten()[orders[i % len(orders)][1].long()].unsqueeze(1) for i in range(n)]

    def added(i):
        return out[i].zero_().index_add_(0, token_of[i % len(token_of)], rows[i] * by_row[i])
    yield Peer('torch index_add', added, lambda: compare(added(0)[:few], want, 3e-2))
    if 'sglang' in have:
        def sglang(i):
            have['sglang'].apply_shuffle_mul_sum(rows[i], out[i], inverse[i % len(inverse)].flatten(), half[i])
            return out[i]
        yield Peer('sglang apply_shuffle_mul_sum', sglang, check(sglang))


def exchange_peers(row, n, have):
    """combine_shuffling and split_shuffling: rows between the order of ranks and that of experts."""
    shape, dtype, combines = shape_of(row), DTYPES[row['dtype']], row['op'] == 'combine_shuffling'
    rows, ranks, experts, hidden = shape['R'], shape['EP'], shape['E'], shape['H']
    x = [torch.randn(rows, hidden, device='cuda', dtype=dtype) for _ in range(n)]
    out = [torch.empty_like(x[0]) for _ in range(n)]
    counts = []
    for _ in range(min(n, 8)):
        pairs = torch.randint(ranks * experts, (rows,), device='cuda')
        counts.append(torch.bincount(pairs, minlength=ranks * experts).view(ranks, experts).to(I32))
    places = torch.arange(rows, device='cuda')

    def index_of(count):
        """Of every row written, the row read."""
        by_rank, by_expert = count, count.T.contiguous()
        starts = (by_rank.flatten().cumsum(0) - by_rank.flatten()).view(ranks, experts)
        starts_of_experts = (by_expert.flatten().cumsum(0) - by_expert.flatten()).view(experts, ranks)
        if combines:
            sizes, read, written = by_expert, starts.T, starts_of_experts
        else:
            sizes, read, written = by_rank, starts_of_experts.T, starts
        apart = (read - written).flatten()
        return torch.repeat_interleave(apart, sizes.flatten().long(), output_size=rows) + places

    def plain(i):
        torch.index_select(x[i], 0, index_of(counts[i % len(counts)]), out=out[i])

    def want():
        count = counts[0].cpu()
        order = [(r, e) for e in range(experts) for r in range(ranks)]
        by_rank = [(r, e) for r in range(ranks) for e in range(experts)]
        read, written = (by_rank, order) if combines else (order, by_rank)
        begins, at = {}, 0
        for pair in read:
            begins[pair], at = at, at + int(count[pair])
        return torch.cat([x[0][begins[pair]:begins[pair] + int(count[pair])] for pair in written])

    def check(call):
        return lambda: (call(0), expect(torch.equal(out[0], want()), 'rows differ'))
    yield Peer('torch index_select', plain, check(plain), eager=True)
    if 'fbgemm' in have:
        moe = importlib.import_module('fbgemm_gpu.experimental.gen_ai.moe')

        def fbgemm(i):
            result = getattr(moe, row['op'])(x[i], counts[i % len(counts)])
            return result[0] if isinstance(result, tuple) else result
        yield Peer(f'fbgemm {row["op"]}', fbgemm, lambda: expect(torch.equal(fbgemm(0), want()), 'rows differ'))


def scatter_peers(row, n, have):
    """Results of every rank's experts, at their positions, added to their tokens."""
    shape, dtype = shape_of(row), DTYPES[row['dtype']]
    tokens, pairs, ranks, hidden = (shape[key] for key in ('T', 'R', 'EP', 'H'))
    experts = 128
    rows = [torch.randn(ranks, pairs, hidden, device='cuda', dtype=dtype) for _ in range(n)]
    out = [torch.empty(tokens, hidden, device='cuda', dtype=dtype) for _ in range(n)]
    ids = [random_ids(tokens, experts, pairs // tokens) for _ in range(min(n, 8))]
    counts = [torch.bincount(i.flatten(), minlength=experts) for i in ids]
    token_of = [(order_of(i, experts)[1] // (pairs // tokens)).contiguous() for i in ids]
    rank_of = torch.arange(experts, device='cuda') // (experts // ranks)
    places = torch.arange(pairs, device='cuda')

    def plain(i):
        j = i % len(ids)
        rank = torch.repeat_interleave(rank_of, counts[j], output_size=pairs)
        return out[i].zero_().index_add_(0, token_of[j], rows[i].view(-1, hidden).index_select(0, rank * pairs + places))

    def check(call):
        rank = rank_of.repeat_interleave(counts[0])
        want = torch.zeros(tokens, hidden, device='cuda').index_add_(0, token_of[0], rows[0][rank, places].float())
        return lambda: compare(call(0), want, 3e-2)
    yield Peer('torch index_add', plain, check(plain), eager=True)
    if 'fbgemm' in have:
        moe = importlib.import_module('fbgemm_gpu.experimental.gen_ai.moe')

        def fbgemm(i):
            j = i % len(ids)
            moe.scatter_add_padded_tokens(rows[i], counts[j].to(I32), token_of[j], out[i].zero_())
            return out[i]
        yield Peer('fbgemm scatter_add_padded_tokens', fbgemm, check(fbgemm))


PEERS = {'combine_shuffling': exchange_peers, 'split_shuffling': exchange_peers, 'scatter_add': scatter_peers,
         'route': route_peers, 'gate': gate_peers, 'order': order_peers, 'shuffle': shuffle_peers, 'gather': gather_peers,
         'activate': activate_peers, 'combine': combine_peers}


# ---- all of it -----------------------------------------------------------------------------------

def time_row(row, report, have, options, failed):
    """Fills row['peers']."""
    torch.manual_seed(1)
    n = variants(row, report['rotate_bytes'])

    def attempt(name, work):
        try:
            row['peers'][name] = work()
        except Exception as error:
            failed.append({'op': row['op'], 'case': row['case'], 'peer': name, 'why': f'{type(error).__name__}: {str(error)[:200]}'})
            print(f'-- {row["op"]} {row["case"]} {name}: {failed[-1]["why"][:140]}', flush=True)
            if isinstance(error, getattr(torch, 'AcceleratorError', ())):
                raise

    for peer in PEERS[row['op']](row, n, have):
        def checked(peer=peer):
            peer.check()
            return graph_us([lambda i=i: peer.call(i) for i in range(n)], options.seconds)
        attempt(peer.name, checked)
        if peer.eager and options.eager:
            attempt(f'{peer.name} eager', lambda peer=peer: eager_us([lambda i=i: peer.call(i) for i in range(n)]))
        if peer.compiled and options.compile and spent_compiling(report) < options.compile_budget:
            began = time.monotonic()

            def compiled(peer=peer):
                torch._dynamo.reset()
                function = torch.compile(peer.compiled[0], dynamic=False)
                arguments = [peer.compiled[1](i) for i in range(n)]
                function(*arguments[0])
                return graph_us([lambda a=a: function(*a) for a in arguments], options.seconds)
            attempt('torch compiled', compiled)
            report['compiling_s'] = spent_compiling(report) + time.monotonic() - began
    torch.cuda.empty_cache()


def spent_compiling(report):
    return report.get('compiling_s', 0.0)


def run_shunt(options):
    """The report of shunt bench over the grid, from a run now or from a file."""
    if options.report:
        with open(options.report, encoding='utf-8') as file:
            return json.load(file)
    with tempfile.TemporaryDirectory() as folder:
        path = f'{folder}/shunt.json'
        command = [options.shunt, 'bench', 'all', '--grid', '--device', 'cuda', '--seconds', str(options.seconds), '--json', path]
        subprocess.run(command + options.more.split(), check=True)
        with open(path, encoding='utf-8') as file:
            return json.load(file)


def write(path, report):
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(report, file, indent=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--shunt', default='build/cuda/bin/shunt', help='the command (default: build/cuda/bin/shunt)')
    parser.add_argument('--report', help='a JSON of shunt bench to add peers to, instead of a run')
    parser.add_argument('--more', default='', help='further options of shunt bench, in one string')
    parser.add_argument('--json', required=True, help='where the merged report goes')
    parser.add_argument('--table', help='where Markdown tables of it go')
    parser.add_argument('--ops', default='', help='only these operations, with commas between')
    parser.add_argument('--peers', default='', help='only these packages beside torch, with commas between')
    parser.add_argument('--seconds', type=float, default=0.06, help='of measuring a case (default: 0.06)')
    parser.add_argument('--no-eager', dest='eager', action='store_false', help='no launches one by one')
    parser.add_argument('--compile-budget', type=float, default=math.inf,
                        help='seconds that torch.compile may take in all; later cases go without')
    parser.add_argument('--no-compile', dest='compile', action='store_false', help='no torch.compile')
    options = parser.parse_args()

    report = run_shunt(options)  # before this process takes memory of the GPU
    wanted = [op for op in options.ops.split(',') if op]
    have, report['peer_versions'] = load([name for name in options.peers.split(',') if name])
    report['failed'] = failed = []
    for row in report['rows']:
        if row['op'] not in PEERS or (wanted and row['op'] not in wanted):
            continue
        try:
            time_row(row, report, have, options, failed)
        except Exception as error:  # no memory for a case, say: the others may still have it
            print(f'-- {row["op"]} {row["case"]}: peers left out: {str(error)[:160]}', flush=True)
            failed.append({'op': row['op'], 'case': row['case'], 'peer': 'all', 'why': f'{type(error).__name__}: {str(error)[:200]}'})
            if isinstance(error, getattr(torch, 'AcceleratorError', ())):
                print('-- the GPU is in no state to go on', flush=True)
                break
            torch.cuda.empty_cache()
        peers = ', '.join(f'{name} {table.microseconds(us)}' for name, us in row['peers'].items())
        print(f'{row["op"]} {row["case"]}: shunt {table.microseconds(row["us"])}; {peers}', flush=True)
        write(options.json, report)  # a run that is cut off leaves what it has
    write(options.json, report)
    if options.table:
        with open(options.table, 'w', encoding='utf-8') as file:
            file.write(table.render([options.json]) + '\n')


if __name__ == '__main__':
    main()
