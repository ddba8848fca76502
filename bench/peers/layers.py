#!/usr/bin/env python3
"""Whole layers of public libraries, timed beside Shunt's on the same GPU: one process, one set of weights and tokens.

    python3 bench/peers/layers.py --library build/shared/libshunt.so --shunt build/cuda/bin/shunt --json layers.json

Shunt is called through its C ABI and so is one way among others: README.md beside this says which others there are and
how all of them are timed, in turn. Every way starts from hidden states, routes them itself and ends with the layer's
output. Each is compared with PyTorch in f32 first; one that is wrong, refuses a shape or cannot be imported is named in
"failed" and has no time. A JSON that is there is added to, so that cases may be spread over several runs.
"""
import argparse
import ctypes
import functools
import importlib
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

for key, value in {'VLLM_LOGGING_LEVEL': 'ERROR', 'VLLM_CONFIGURE_LOGGING': '0', 'TOKENIZERS_PARALLELISM': 'false'}.items():
    os.environ.setdefault(key, value)
for folder in filter(None, os.environ.get('PEERS_SITE', '').split(':')):
    sys.path.insert(0, folder)
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
import fp8  # noqa: E402  bench/peers/fp8.py
import packed  # noqa: E402  bench/peers/packed.py
import table  # noqa: E402  bench/table.py

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

BF16, F8, I32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32

# H, I, E and k of a layer, the tokens, and what is not a softmax over the chosen logits and SwiGLU.
CASES = {
    'qwen3': dict(name='Qwen3-30B-A3B', H=2048, I=768, E=128, k=8, tokens=['1', '4', '16', '64', '256', '1024', '8192', '8192z']),
    'dsv3': dict(name='DeepSeek-V3, 32 of 256 experts', H=7168, I=2048, E=32, k=1, tokens=['1', '64', '512', '4096']),
    'mixtral': dict(name='Mixtral 8x7B', H=4096, I=14336, E=8, k=2, tokens=['1', '16', '128', '2048']),
    'scout': dict(name='Llama 4 Scout, 1 of 8 shards', H=5120, I=1024, E=16, k=1, on_input=True, tokens=['1', '64', '1024']),
    'scout-shared': dict(name='Llama 4 Scout, 1 of 8 shards, shared expert', H=5120, I=1024, E=16, k=1, on_input=True, shared=1024,
                         tokens=['1', '64', '1024']),
    'gptoss': dict(name='gpt-oss-20b, SwiGLU', H=2880, I=2880, E=32, k=4, tokens=['1', '64', '1024']),
}


# ---- data ----------------------------------------------------------------------------------------

class Weights:
    """One copy of a layer: w13 [E, 2I, H], gate's rows before up's, and w2 [E, H, I]."""

    def __init__(self, case):
        hidden, inner, experts = case['H'], case['I'], case['E']

        def matrices(count, rows, columns):
            w = torch.empty(count, rows, columns, device='cuda', dtype=BF16)
            for e in range(count):
                w[e].normal_(0, columns ** -0.5)
            return w

        # Logits with the deviation of Gumbel's noise, so that a bias of log p draws by p.
        self.router = torch.empty(experts, hidden, device='cuda', dtype=BF16).normal_(0, 1.28 * hidden ** -0.5)
        self.zipf = (1 / torch.arange(1, experts + 1, device='cuda').float()).log()[torch.randperm(experts, device='cuda')].to(BF16)
        if case.get('format') == 'fp8_block':
            self.made13, self.made2 = fp8.Matrix(experts, 2 * inner, hidden), fp8.Matrix(experts, hidden, inner)
            self.w13, self.w2 = self.made13.plain, self.made2.plain
        elif case.get('format'):
            self.made13, self.made2 = packed.Matrix(case, experts, 2 * inner, hidden), packed.Matrix(case, experts, hidden, inner)
            self.w13, self.w2 = self.made13.plain, self.made2.plain
        else:
            self.w13, self.w2 = matrices(experts, 2 * inner, hidden), matrices(experts, hidden, inner)
        self.shared13 = self.shared2 = None
        if case.get('shared'):
            self.shared13, self.shared2 = matrices(1, 2 * case['shared'], hidden)[0], matrices(1, hidden, case['shared'])[0]


def activated(case, h):
    gate, up = h[:case['I']], h[case['I']:]
    rule = case.get('activation')
    if rule is None:
        return F.silu(gate) * up
    gate = gate.clamp(max=rule['limit'])
    return gate * torch.sigmoid(rule['alpha'] * gate) * (up.clamp(-rule['limit'], rule['limit']) + rule['up_offset'])


class Batch:
    """Hidden states of one call, the copy of the layer that they go to, and f32's choice for them."""

    def __init__(self, case, weights, tokens, zipf):
        self.weights, self.case = weights, case
        self.bias = weights.zipf if zipf else None
        self.x = torch.randn(tokens, case['H'], device='cuda', dtype=BF16)
        logits = self.x.float() @ weights.router.float().T
        if zipf:
            logits += self.bias.float()
        self.given = None  # where a layer begins with the logits
        if case['from'] == 'logits':
            self.given = F.linear(self.x, weights.router, self.bias)
            logits = self.given.float()
        values, self.ids = logits.topk(case['k'], -1)
        self.gates = values.sigmoid() if case.get('on_input') else values.softmax(-1)

    def logits(self):
        return F.linear(self.x, self.weights.router, self.bias) if self.given is None else self.given

    def reference(self, rows):
        """The layer in f32 for some rows."""
        case, w = self.case, self.weights
        out = torch.zeros(len(rows), case['H'], device='cuda')
        for r, t in enumerate(rows):
            x = self.x[t].float()
            for e, gate in zip(self.ids[t].tolist(), self.gates[t].tolist()):
                h = w.w13[e].float() @ (x * gate if case.get('on_input') else x)
                y = w.w2[e].float() @ activated(case, h)
                out[r] += y if case.get('on_input') else gate * y
            if w.shared13 is not None:
                h = w.shared13.float() @ x
                out[r] += w.shared2.float() @ (F.silu(h[:case['shared']]) * h[case['shared']:])
        return out


def floor(batches, tokens, limits):
    """Microseconds, bytes and operations that a call cannot do without, a mean over the batches."""
    case = batches[0].case
    hit = sum(len(batch.ids.unique()) for batch in batches) / len(batches)
    matrices = 3 * case['H'] * case['I']
    shared = 3 * case['H'] * case.get('shared', 0)
    moved = hit * matrices * case.get('bits', 16) / 8 + 2 * (shared + case['E'] * case['H'] + 2 * tokens * case['H'])
    done = 2 * tokens * (case['k'] * matrices + shared + case['E'] * case['H'])
    rate = limits['bf16_TFLOPs'] * (2 if case.get('rows') else 1)  # fp8 rows: twice as many a clock
    us = max(limits['read_start_us'] + moved / limits['read_GBps'] / 1e3, done / rate / 1e6)
    return us, moved, done


# ---- ways to compute a layer ---------------------------------------------------------------------

class NotForThis(Exception):
    """A way that a case is none of."""


class Way:
    """call(batch) enqueues a layer and returns its output. `eager`: also timed launched one by one."""
    name, packages, eager = '', (), False

    def __init__(self, case, copies, stream):
        self.case = case

    def takes(self, tokens):
        return True

    def workspace(self, batch):
        """Bytes that a call takes beside its inputs and output, as PyTorch's allocator counts."""
        self.call(batch)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = self.call(batch)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - out.nbytes


class CTensor(ctypes.Structure):
    _fields_ = [('data', ctypes.c_void_p), ('dtype', ctypes.c_int32), ('device_type', ctypes.c_int32),
                ('device_index', ctypes.c_int32), ('rank', ctypes.c_int32), ('shape', ctypes.c_int64 * 4), ('strides', ctypes.c_int64 * 4)]

    @classmethod
    def of(cls, tensor):
        codes = {torch.float32: 0, torch.float16: 1, BF16: 2, I32: 6}
        made = cls(tensor.data_ptr(), codes[tensor.dtype], 1, tensor.device.index or 0, tensor.dim())
        for d in range(tensor.dim()):
            made.shape[d], made.strides[d] = tensor.shape[d], tensor.stride(d)
        return made


POINTER = ctypes.POINTER(CTensor)


def struct(name, *fields):
    """A struct of the C ABI: its size first, then pointers, but for the integers that are named."""
    kinds = [('struct_size', ctypes.c_uint64)] + [(f[1:], ctypes.c_int32) if f[0] == '#' else (f[1:], ctypes.c_void_p) if f[0] == '*' else (f, POINTER)
                                                  for f in fields]
    kind = type(name, (ctypes.Structure,), {'_fields_': kinds})

    def make(**values):
        return kind(struct_size=ctypes.sizeof(kind), **values)
    return make


CudaOptions = struct('CudaOptions', '*stream', '#index', '#dependent_launch')
LayerOptions = struct('LayerOptions', '#dtype', '#in_place', '#batch_invariant', '#rows', '*format')
ExpertWeights = struct('ExpertWeights', '#count', '#reserved', 'gate', 'up', 'down', 'gate_bias', 'up_bias', 'down_bias')
LayerWeights = struct('LayerWeights', 'router', 'router_bias', 'selection_bias', 'per_expert_scale', 'hash_table', '*experts', '*shared', 'shared_gate',
                      'latent_down', 'latent_up', 'output_bias', 'router_norm', 'input_norm', 'output_norm')
Inputs = struct('Inputs', 'hidden', 'token_ids', 'residual', 'valid_tokens', 'logits', 'ids', 'weights')
Outputs = struct('Outputs', 'output', 'ids', 'weights')


class Shunt(Way):
    name = 'shunt'
    library = None

    def __init__(self, case, copies, stream):
        super().__init__(case, copies, stream)
        api = Shunt.api = ctypes.CDLL(Shunt.library)
        api.shunt_last_error.restype = ctypes.c_char_p
        self.context = ctypes.c_void_p()
        self.done(api.shunt_context_create_cuda_with(ctypes.byref(CudaOptions(stream=stream.cuda_stream, index=0, dependent_launch=1)),
                                                     ctypes.byref(self.context)))
        self.layers, self.memory = {}, None
        for zipf in {t.endswith('z') for t in case['wanted']}:
            for weights in copies:
                self.layers[weights, zipf] = self.prepare(weights, zipf)

    def done(self, status):
        if status != 0:
            raise RuntimeError(self.api.shunt_last_error().decode())

    def prepare(self, weights, zipf):
        case = self.case
        biased = zipf and case['from'] == 'hidden'  # logits that are given have it already
        keep = []

        def one(tensor):
            keep.append(CTensor.of(tensor))
            return ctypes.pointer(keep[-1])

        def experts(w13, w2):
            inner, count = w2.shape[2], len(w13)
            keep.extend([(CTensor * count)(*[CTensor.of(m) for m in matrices])
                         for matrices in ([w[:inner] for w in w13], [w[inner:] for w in w13], list(w2))])
            made = ExpertWeights(count=count, **{name: ctypes.cast(keep[i - 3], POINTER) for i, name in enumerate(['gate', 'up', 'down'])})
            keep.append(made)
            return ctypes.cast(ctypes.pointer(made), ctypes.c_void_p)

        swiglu = case.get('activation', {'kind': 'silu', 'gated': True})
        kind = case['format'].encode() if case.get('format') else None
        spec = {'hidden': case['H'],
                'route': {'experts': case['E'], 'top_k': case['k'], 'score': 'sigmoid' if case.get('on_input') else 'softmax',
                          'renormalize': not case.get('on_input'), 'router_bias': biased, 'weight_on_input': bool(case.get('on_input'))},
                'experts': {'experts': case['E'], 'hidden': case['H'], 'intermediate': case['I'], 'activation': swiglu}}
        given = {'router': one(weights.router), 'experts': experts(weights.w13, weights.w2)}
        if biased:
            given['router_bias'] = one(weights.zipf)
        if case.get('shared'):
            spec['shared'] = {'intermediate': case['shared'], 'activation': swiglu}
            given['shared'] = experts(weights.shared13[None], weights.shared2[None])
        layer = ctypes.c_void_p()
        torch.cuda.synchronize()  # the weights are there
        self.done(self.api.shunt_layer_create(self.context, json.dumps(spec).encode(), ctypes.byref(LayerWeights(**given)),
                                              ctypes.byref(LayerOptions(dtype=2, rows=case.get('rows', 0), format=ctypes.cast(kind, ctypes.c_void_p))),
                                              ctypes.byref(layer)))
        return layer

    def layer(self, batch):
        return self.layers[batch.weights, batch.bias is not None]

    def workspace(self, batch):
        size = ctypes.c_size_t()
        self.done(self.api.shunt_layer_workspace_bytes(self.layer(batch), ctypes.c_int64(len(batch.x)), ctypes.byref(size)))
        self.memory = torch.empty(size.value + 256, device='cuda', dtype=torch.uint8)
        self.at, self.room = -(-self.memory.data_ptr() // 256) * 256, size.value
        return size.value

    def call(self, batch):
        out = torch.empty_like(batch.x)
        x, y = CTensor.of(batch.x), CTensor.of(out)
        given = {} if batch.given is None else {'logits': ctypes.pointer(CTensor.of(batch.given))}
        self.done(self.api.shunt_layer_forward(self.layer(batch), ctypes.byref(Inputs(hidden=ctypes.pointer(x), **given)),
                                               ctypes.byref(Outputs(output=ctypes.pointer(y))), ctypes.c_void_p(self.at), ctypes.c_size_t(self.room)))
        return out

    def close(self):
        for layer in self.layers.values():
            self.api.shunt_layer_destroy(layer)
        self.api.shunt_context_destroy(self.context)


def add_shared(batch, out):
    """The shared expert as a model of these libraries has it: two linear layers, and a sum."""
    w = batch.weights
    if w.shared13 is None:
        return out
    h = F.linear(batch.x, w.shared13)
    inner = h.shape[1] // 2
    return out + F.linear(F.silu(h[:, :inner]) * h[:, inner:], w.shared2)


class Torch(Way):
    """Sorted pairs through torch._grouped_mm."""
    name, packages, eager = 'torch grouped_mm', ('torch',), True

    def order(self, batch):
        """Gates [T, k], and of pairs in the order of experts which they are and where experts end."""
        case = self.case
        values, ids = batch.logits().topk(case['k'], -1)
        gates = values.float().sigmoid() if case.get('on_input') else values.float().softmax(-1)
        ranked, permutation = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(ranked, torch.arange(1, case['E'] + 1, device='cuda', dtype=ranked.dtype)).to(I32)
        return gates, permutation, ends

    def call(self, batch):
        case, w, x = self.case, batch.weights, batch.x
        gates, permutation, ends = self.order(batch)
        token = permutation // case['k']
        rows, gate = x[token], gates.flatten()[permutation].unsqueeze(1)
        if case.get('on_input'):
            rows = (rows * gate).to(BF16)
        h = torch._grouped_mm(rows, w.w13.transpose(1, 2), offs=ends)
        h = F.silu(h[:, :case['I']]) * h[:, case['I']:]
        y = torch._grouped_mm(h, w.w2.transpose(1, 2), offs=ends)
        if not case.get('on_input'):
            y = (y * gate).to(BF16)
        out = torch.zeros_like(x).index_add_(0, token, y)
        return add_shared(batch, out)


@functools.cache
def quack_interface():
    """quack.gemm_interface. quack 0.6.5 makes keys of values, and none of a ContextVar that cutlass-dsl 4.8 has beside its activations: that is named by its type."""
    interface, identity = map(importlib.import_module, ['quack.gemm_interface', 'quack.gemm_runtime.identity'])
    made = identity.semantic_value_key

    def key(value, *rest, **named):
        try:
            return made(value, *rest, **named)
        except TypeError:
            return 'opaque', type(value).__module__, type(value).__qualname__

    identity.semantic_value_key = key
    return interface


class Quack(Torch):
    """quack's two products by its default tiles, the first of which gathers rows and multiplies gate and up; PyTorch routes, orders and adds up."""
    name, packages, eager = 'quack between torch', ('quack-kernels', 'nvidia-cutlass-dsl'), False

    def __init__(self, case, copies, stream):
        super().__init__(case, copies, stream)
        if case.get('on_input') or case.get('activation'):
            raise NotForThis('weights on the input, or another activation than SwiGLU')
        interface = quack_interface()
        self.gemm, self.gated = interface.gemm, interface.gemm_gated
        # Rows of gate and up in turn.
        self.woven = {w: torch.stack(w.w13.chunk(2, 1), 2).flatten(1, 2) for w in copies}

    def call(self, batch):
        case, x = self.case, batch.x
        gates, permutation, ends = self.order(batch)
        starts = F.pad(ends, (1, 0))
        rows = (permutation // case['k']).to(I32)
        h = self.gated(x, self.woven[batch.weights].mT, activation='swiglu', cu_seqlens_m=starts, A_idx=rows, store_preact=False, tuned=False)[1]
        y = self.gemm(h, batch.weights.w2.mT, cu_seqlens_m=starts, tuned=False)
        inverse = torch.empty_like(permutation)
        inverse[permutation] = torch.arange(len(permutation), device='cuda')
        return add_shared(batch, (y[inverse].view(len(x), case['k'], -1) * gates.unsqueeze(-1)).sum(1).to(BF16))


class Vllm(Way):
    """fused_experts, with the tuned file of the package where it has one for the shape and the GPU."""
    name, packages, eager = 'vllm fused_experts', ('vllm',), False

    def __init__(self, case, copies, stream):
        super().__init__(case, copies, stream)
        platforms = importlib.import_module('vllm.platforms')
        platforms._current_platform = importlib.import_module('vllm.platforms.cuda').NonNvmlCudaPlatform()
        importlib.import_module('vllm._moe_C_stable_libtorch')
        self.fused = importlib.import_module('vllm.model_executor.layers.fused_moe.fused_moe')
        self.topk = importlib.import_module('vllm.model_executor.layers.fused_moe.router.fused_topk_router').fused_topk
        tuned = self.fused.get_moe_configs(case['E'], case['I'], None, 0, 0) is not None
        self.name = 'vllm fused_experts' + ('' if tuned else ', no tuned file')

    def route(self, batch):
        on_input = bool(self.case.get('on_input'))
        gates, ids, _ = self.topk(batch.x, batch.logits(), self.case['k'], renormalize=not on_input, scoring_func='sigmoid' if on_input else 'softmax')
        return gates, ids

    def call(self, batch):
        gates, ids = self.route(batch)
        out = self.fused.fused_experts(batch.x, batch.weights.w13, batch.weights.w2, gates, ids,
                                       apply_router_weight_on_input=bool(self.case.get('on_input')))
        return add_shared(batch, out)


TILES = {  # rows, columns, along k, group, warps, stages: by rows of an expert
    'few': [(16, 64, 128, 1, 4, 4), (16, 128, 128, 1, 8, 4), (16, 64, 256, 1, 4, 3)],
    'some': [(32, 128, 64, 8, 4, 4), (64, 128, 64, 8, 4, 4), (16, 128, 128, 1, 4, 3)],
    'many': [(128, 128, 64, 16, 8, 3), (128, 256, 64, 16, 8, 4), (64, 256, 64, 16, 8, 3)],
}


class VllmTiles(Vllm):
    """fused_experts where the package has no tuned file: the best of three tiles picked by hand."""

    def __init__(self, case, copies, stream):
        super().__init__(case, copies, stream)
        if 'no tuned' not in self.name:
            raise NotForThis('vllm has a tuned file')
        self.name, self.tiles = 'vllm fused_experts, best of 3 tiles', {}
        self.override = importlib.import_module('vllm.model_executor.layers.fused_moe').override_config

    def pick(self, batch):
        rows = len(batch.x) * self.case['k'] / self.case['E']
        best = math.inf
        for numbers in TILES['few' if rows <= 8 else 'some' if rows < 96 else 'many']:
            tile = dict(zip(('BLOCK_SIZE_M', 'BLOCK_SIZE_N', 'BLOCK_SIZE_K', 'GROUP_SIZE_M', 'num_warps', 'num_stages'), numbers))
            self.tiles[len(batch.x)] = tile
            try:
                us = eager_us(lambda: self.call(batch), 10)
            except Exception as error:  # too much shared memory, say
                print(f'-- {self.name} {numbers}: {str(error)[:100]}', flush=True)
                continue
            if us < best:
                best, chosen = us, tile
        self.tiles[len(batch.x)] = chosen

    def call(self, batch):
        if len(batch.x) not in self.tiles:
            self.pick(batch)
        with self.override(self.tiles[len(batch.x)]):
            return super().call(batch)


class DeepGemm(Vllm):
    """DeepGEMM's grouped GEMM of rows in padded groups, as vLLM carries it, between PyTorch's gather, SiLU and sum."""
    name = 'deepgemm contiguous'

    def __init__(self, case, copies, stream):
        super().__init__(case, copies, stream)
        self.name = 'deepgemm contiguous'
        self.gemm = importlib.import_module('vllm.third_party.deep_gemm').m_grouped_bf16_gemm_nt_contiguous

    def takes(self, tokens):
        return tokens * self.case['k'] >= 8 * self.case['E'] and not self.case.get('on_input')

    def call(self, batch):
        case, w, x = self.case, batch.weights, batch.x
        gates, ids = self.route(batch)
        flat = ids.flatten().long()
        pairs, experts, tile = flat.numel(), case['E'], 128
        counts = torch.zeros(experts, device='cuda', dtype=torch.long).index_add_(0, flat, torch.ones_like(flat))
        padded = (counts + tile - 1) // tile * tile
        ends = padded.cumsum(0)
        room = -(-(pairs + experts * (tile - 1)) // tile) * tile
        expert_of = torch.searchsorted(ends, torch.arange(room, device='cuda'), right=True)
        expert_of = torch.where(expert_of < experts, expert_of, -1).to(I32)
        ranked, permutation = flat.sort(stable=True)
        places = torch.arange(pairs, device='cuda') + (ends - padded - (counts.cumsum(0) - counts))[ranked]
        rows = torch.zeros(room, case['H'], device='cuda', dtype=BF16)
        rows[places] = x[permutation // case['k']]
        h = torch.empty(room, 2 * case['I'], device='cuda', dtype=BF16)
        self.gemm(rows, w.w13, h, expert_of)
        a = F.silu(h[:, :case['I']]) * h[:, case['I']:]
        y = torch.empty(room, case['H'], device='cuda', dtype=BF16)
        self.gemm(a, w.w2, y, expert_of)
        inverse = torch.empty_like(places)
        inverse[permutation] = places
        return add_shared(batch, (y[inverse].view(len(x), case['k'], -1) * gates.unsqueeze(-1)).sum(1).to(BF16))


class FlashInfer(Vllm):
    """cutlass_fused_moe, its tactics chosen by its own tuner; vLLM's choice of experts."""
    name, packages = 'flashinfer cutlass_fused_moe', ('flashinfer-python',)

    def __init__(self, case, copies, stream):
        self.fi = importlib.import_module('flashinfer.fused_moe').cutlass_fused_moe
        self.autotune = importlib.import_module('flashinfer.autotuner').autotune
        super().__init__(case, copies, stream)
        self.name, self.tuned = 'flashinfer cutlass_fused_moe', set()
        if case.get('on_input'):
            raise NotForThis('it weighs outputs only')
        # It wants up's rows before gate's.
        self.w13 = {w: torch.cat([w.w13[:, case['I']:], w.w13[:, :case['I']]], 1) for w in copies}

    def call(self, batch):
        gates, ids = self.route(batch)
        tokens, out = len(batch.x), torch.empty_like(batch.x)
        tuning = tokens not in self.tuned
        self.tuned.add(tokens)
        with self.autotune(tuning, tuning_buckets=(tokens,)):
            self.fi(batch.x, ids, gates, self.w13[batch.weights], batch.weights.w2, BF16, quant_scales=[], output=out)
        return add_shared(batch, out)


class SGLang(Vllm):
    """SGLang's own fused_experts, where the whole package is installed: its wheel of kernels has no bf16 layer."""
    name, packages = 'sglang fused_experts', ('sglang',)

    def __init__(self, case, copies, stream):
        self.impl = importlib.import_module('sglang.srt.layers.moe.fused_moe_triton.fused_moe').fused_experts_impl
        super().__init__(case, copies, stream)
        self.name = 'sglang fused_experts'

    def call(self, batch):
        gates, ids = self.route(batch)
        return add_shared(batch, self.impl(batch.x, batch.weights.w13, batch.weights.w2, gates, ids,
                                           apply_router_weight_on_input=bool(self.case.get('on_input'))))


class Marlin(Vllm):
    """vLLM's choice, packed weights through Marlin."""

    def __init__(self, case, copies, stream):
        super().__init__(case, copies, stream)
        self.name, self.call = 'vllm marlin', packed.Marlin(self, case, copies).call


class TritonKernels(Way):
    """OpenAI's triton_kernels, routing and all, as the wheel of SGLang's kernels carries it."""
    name, packages = 'triton_kernels', ('sglang-kernel',)

    def __init__(self, case, copies, stream):
        super().__init__(case, copies, stream)
        self.call = packed.TritonKernels(case, copies).call


class VllmFp8(Vllm):
    """vLLM's choice, and one of the ways of fp8.py."""
    kind = fp8.Triton

    def __init__(self, case, copies, stream):
        super().__init__(case, copies, stream)
        made = self.kind(self, case, copies)
        self.name, self.call = made.name, made.call


class DeepGemmFp8(VllmFp8):
    kind = fp8.DeepGemm


class SGLangFp8(Way):
    packages = ('sglang-kernel',)

    def __init__(self, case, copies, stream):
        super().__init__(case, copies, stream)
        made = fp8.SGLang(self, case, copies)
        self.name, self.call = made.name, made.call


PACKED_WAYS = {'shunt': Shunt, 'marlin': Marlin, 'triton_kernels': TritonKernels}
FP8_WAYS = {'shunt': Shunt, 'vllm': VllmFp8, 'deepgemm': DeepGemmFp8, 'sglang': SGLangFp8}
WAYS = {'shunt': Shunt, 'torch': Torch, 'vllm': Vllm, 'vllm_tiles': VllmTiles, 'deepgemm': DeepGemm, 'quack': Quack, 'flashinfer': FlashInfer, 'sglang': SGLang}


# ---- timing --------------------------------------------------------------------------------------

def eager_us(call, times=32):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / times


class Timed:
    """A way's calls over all batches in one CUDA graph, sampled again and again."""

    def __init__(self, call, batches, stream):
        self.stream, self.count, self.samples = stream, len(batches), []
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for batch in batches[:2]:
                call(batch)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                self.results = [call(batch) for batch in batches]
        self.begin, self.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.replays = 1
        self.replays = min(max(int(8e3 / max(self.sample() * self.count, 1)), 1), 100)
        self.samples = []

    def sample(self):
        with torch.cuda.stream(self.stream):
            self.graph.replay()  # what ran before this left other things in the caches
            self.begin.record(self.stream)
            for _ in range(self.replays):
                self.graph.replay()
            self.end.record(self.stream)
            self.end.synchronize()
        self.samples.append(1e3 * self.begin.elapsed_time(self.end) / self.replays / self.count)
        return self.samples[-1]

    def median(self):
        return sorted(self.samples)[len(self.samples) // 2]


def check(out, batch):
    """Against f32, row by row; a near tie between logits in bf16 may send a row elsewhere."""
    rows = sorted({round(i * (len(batch.x) - 1) / 11) for i in range(12)})
    want = batch.reference(rows)
    errors = ((out[rows].float() - want).norm(dim=1) / want.norm(dim=1)).sort()[0]
    middle = errors[len(errors) // 2].item()
    if not middle < batch.case.get('tolerance', 0.02):
        raise AssertionError(f'relative error {middle:.3g}')


# ---- all of it -----------------------------------------------------------------------------------

def time_case(case, name, ways, copies, stream, options, report):
    zipf, tokens = name.endswith('z'), int(name.rstrip('z'))
    torch.manual_seed(tokens)
    batches = [Batch(case, copies[i % len(copies)], tokens, zipf) for i in range(32 if tokens <= 64 else 8 if tokens <= 1024 else 4)]
    us, moved, done = floor(batches, tokens, report['ceilings'])
    label = f'{case["name"]} T{tokens}' + (' Zipf' if zipf else '')
    row = {'op': 'layer', 'case': label, 'dtype': case.get('format', 'bf16'), 'device': 'cuda', 'us': None, 'floor_us': us, 'share': None, 'bytes': moved, 'flops': done,
           'workspace_bytes': None, 'peers': {}, 'peer_workspace_bytes': {}, 'samples': {}}
    timed, eager = {}, {}
    for way in ways:
        if not way.takes(tokens):
            continue
        try:
            bytes_taken = way.workspace(batches[0])
            with torch.cuda.stream(stream):
                out = way.call(batches[0])
            torch.cuda.synchronize()
            check(out, batches[0])
            timed[way.name] = Timed(way.call, batches, stream)
            if way.name == 'shunt':
                row['workspace_bytes'] = bytes_taken
            else:
                row['peer_workspace_bytes'][way.name] = bytes_taken
            if way.eager and options.eager:
                eager[f'{way.name} eager'] = eager_us(lambda way=way: way.call(batches[0]))
        except Exception as error:
            report['failed'].append({'op': 'layer', 'case': label, 'peer': way.name, 'why': f'{type(error).__name__}: {str(error)[:200]}'})
            print(f'-- {label} {way.name}: {report["failed"][-1]["why"]}', flush=True)
            if isinstance(error, getattr(torch, 'AcceleratorError', ())):
                raise
    for _ in range(options.rounds):  # in turn: the clock that one leaves is the next one's
        for way in timed.values():
            way.sample()
    for name, way in timed.items():
        row['samples'][name] = [round(us, 2) for us in way.samples]
        if name == 'shunt':
            row['us'], row['share'] = way.median(), row['floor_us'] / way.median()
        else:
            row['peers'][name] = way.median()
    row['peers'].update(eager)
    if row['us'] is not None:
        report['rows'] = [other for other in report['rows'] if (other['case'], other['dtype']) != (label, row['dtype'])] + [row]
    words = ', '.join(f'{name} {table.microseconds(us)}' for name, us in row['peers'].items())
    print(f'{label}: shunt {table.microseconds(row["us"])} (floor {table.microseconds(row["floor_us"])}); {words}', flush=True)


def first_report(options):
    """The machine and its ceilings by a run of the command, or what an earlier run left."""
    if os.path.exists(options.json):
        with open(options.json, encoding='utf-8') as file:
            return json.load(file)
    with tempfile.TemporaryDirectory() as folder:
        path = f'{folder}/shunt.json'
        subprocess.run([options.shunt, 'bench', 'layer', '--device', 'cuda', '--model', 'qwen3-30b-a3b', '--tokens', '16', '--dependent-launch',
                        '--seconds', '0.05', '--json', path], check=True)
        with open(path, encoding='utf-8') as file:
            report = json.load(file)
    return {'machine': report['machine'], 'ceilings': report['ceilings'], 'peer_versions': {}, 'failed': [], 'command_rows': report['rows'], 'rows': []}


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return 'of unknown version'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--library', default='build/shared/libshunt.so', help='the library, shared and with CUDA')
    parser.add_argument('--shunt', default='build/cuda/bin/shunt', help='the command, for the ceilings (default: build/cuda/bin/shunt)')
    parser.add_argument('--json', required=True, help='where the report goes; added to where it is there')
    parser.add_argument('--cases', default=','.join(CASES), help=f'of {", ".join([*CASES, *packed.CASES, *fp8.CASES])}')
    parser.add_argument('--tokens', default='', help='only these numbers of tokens, with commas between; 8192z: Zipf')
    parser.add_argument('--ways', default='', help=f'of {", ".join(WAYS)}; packed cases: of {", ".join(PACKED_WAYS)}; fp8: of {", ".join(FP8_WAYS)} (default: all)')
    parser.add_argument('--from', dest='begin', choices=['hidden', 'logits'], default='hidden', help='where a layer begins (default: hidden states)')
    parser.add_argument('--rounds', type=int, default=7, help='samples of each (default: 7)')
    parser.add_argument('--no-eager', dest='eager', action='store_false', help='no launches one by one')
    parser.add_argument('--budget', type=float, default=math.inf, help='seconds after which no further case is begun')
    options = parser.parse_args()
    began = time.monotonic()

    report = first_report(options)  # before this process takes memory of the GPU
    Shunt.library = os.path.abspath(options.library)
    stream = torch.cuda.Stream()
    for key in options.cases.split(','):
        case = dict({**CASES, **packed.CASES, **fp8.CASES}[key])
        known = FP8_WAYS if case.get('format') == 'fp8_block' else PACKED_WAYS if case.get('format') else WAYS
        case['from'] = options.begin
        case['wanted'] = [t for t in case['tokens'] if not options.tokens or t in options.tokens.split(',')]
        if not case['wanted'] or time.monotonic() - began > options.budget:
            continue
        torch.manual_seed(1)
        size = 3 * case['E'] * case['H'] * case['I'] * case.get('bits', 16) / 8
        copies = [Weights(case) for _ in range(max(1, min(4, math.ceil(2e9 / size))))]
        ways = []
        for name in options.ways.split(',') if options.ways else known:
            try:
                ways.append(known[name](case, copies, stream))
                report['peer_versions'].update({package: version(package) for package in ways[-1].packages})
            except NotForThis:
                pass
            except Exception as error:
                print(f'-- {key} {name}: not timed: {str(error)[:200]}', flush=True)
        for tokens in case['wanted']:
            if time.monotonic() - began > options.budget:
                print(f'-- {key} T{tokens}: no time left', flush=True)
                continue
            time_case(case, tokens, ways, copies, stream, options, report)
            with open(options.json, 'w', encoding='utf-8') as file:  # a run that is cut off leaves what it has
                json.dump(report, file, indent=1)
            torch.cuda.empty_cache()
        for way in ways:
            if hasattr(way, 'close'):
                way.close()
        del ways, copies
        torch.cuda.empty_cache()
    print(f'{time.monotonic() - began:.0f} s', flush=True)


if __name__ == '__main__':
    main()
