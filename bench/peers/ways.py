"""The ways to compute a layer that layers.py times: Shunt through its C ABI, and public libraries. A package is imported when its way is made."""
import ctypes
import functools
import importlib
import json
import math

import fp8
import packed
import torch
import torch.nn.functional as F

BF16, I32 = torch.bfloat16, torch.int32


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
LayerOptions = struct('LayerOptions', '#dtype', '#in_place', '#batch_invariant', '#rows', '*format', '#fast_accumulation', '#reserved')
ExpertWeights = struct('ExpertWeights', '#count', '#reserved', 'gate', 'up', 'down', 'gate_bias', 'up_bias', 'down_bias')
LayerWeights = struct('LayerWeights', 'router', 'router_bias', 'selection_bias', 'per_expert_scale', 'hash_table', '*experts', '*shared', 'shared_gate',
                      'latent_down', 'latent_up', 'output_bias', 'router_norm', 'input_norm', 'output_norm', 'latent_norm', 'latent_input_norm', 'expert_norm')
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
