"""Cases of layers.py whose experts are packed, and the libraries that multiply them: vLLM's Marlin, OpenAI's triton_kernels.

Weights are made from codes and scales, so that a format holds them exactly: every way multiplies the same numbers, Shunt
packing them itself from bf16. int4 is the exception, where Shunt and the peer round plain weights each by its own rule.
"""
import importlib

import torch

BF16, U8, I32 = torch.bfloat16, torch.uint8, torch.int32
E2M1 = (0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6)

QWEN3 = dict(H=2048, I=768, E=128, k=8, tokens=['1', '4', '16', '64', '256', '1024'])
NEXT = dict(name='Qwen3-Next-80B-A3B, routed experts', H=2048, I=512, E=512, k=10, tokens=['1', '4', '16', '64', '256', '1024'])
DSV3 = dict(name='DeepSeek-V3, 32 of 256 experts', H=7168, I=2048, E=32, k=1, tokens=['1', '2', '4', '8', '16', '32', '64', '512'])
INT4 = dict(format='int4:128', bits=4.125, tolerance=.25)
CASES = {
    'qwen3-nvfp4': dict(QWEN3, name='Qwen3-30B-A3B', format='nvfp4', bits=4.5),
    'qwen3-int4': dict(QWEN3, name='Qwen3-30B-A3B', **INT4),
    'next-nvfp4': dict(NEXT, format='nvfp4', bits=4.5),
    'next-int4': dict(NEXT, **INT4),
    'dsv3-nvfp4': dict(DSV3, format='nvfp4', bits=4.5),
    'dsv3-int4': dict(DSV3, **INT4),
    'mixtral-nvfp4': dict(name='Mixtral 8x7B', H=4096, I=14336, E=8, k=2, format='nvfp4', bits=4.5, tokens=['1', '16', '128']),
    'gptoss-mxfp4': dict(name='gpt-oss-20b', H=2880, I=2880, E=32, k=4, format='mxfp4', bits=4.25, tokens=['1', '16', '64', '256', '1024'],
                         activation={'kind': 'silu', 'gated': True, 'alpha': 1.702, 'limit': 7.0, 'up_offset': 1.0}),
}


class Matrix:
    """Matrices [E, N, K] of a format: `plain` in bf16, and what it was made of."""

    def __init__(self, case, count, rows, columns):
        kind = case['format'].split(':')[0]
        self.plain = torch.empty(count, rows, columns, device='cuda', dtype=BF16)
        self.codes = self.scales = None
        if kind == 'int4':
            for e in range(count):
                self.plain[e].normal_(0, columns ** -0.5)
            return
        group = 16 if kind == 'nvfp4' else 32
        values = torch.tensor(E2M1, device='cuda')
        self.codes = torch.randint(0, 16, (count, rows, columns), device='cuda', dtype=U8)
        self.codes[:, :, ::group] |= 7  # the largest of each block, so that a block's scale is what any rule finds
        if kind == 'nvfp4':
            # From 128 to 448, which a block of gate and one of up have; a power of two for the matrix.
            self.scales = torch.randint(0, 15, (count, rows, columns // group), device='cuda')
            self.scales[:, ::rows // 2, 0] = 14
            self.scales = torch.exp2(7 + self.scales // 8) * (1 + self.scales % 8 / 8)
            self.power = round(math_log2(columns ** -0.5 / (256 * 3)))
            factors = self.scales * 2.0 ** self.power
        else:
            middle = 127 + round(math_log2(columns ** -0.5 / 3))
            self.scales = torch.randint(middle - 1, middle + 2, (count, rows, columns // group), device='cuda', dtype=U8)
            factors = torch.exp2(self.scales.float() - 127)
        for e in range(count):
            self.plain[e] = values[self.codes[e].int()] * factors[e].repeat_interleave(group, 1)

    def bytes_of(self, e, order=slice(None)):
        """Two codes a byte, the even one's in the low half."""
        codes = self.codes[e][order]
        return codes[:, 0::2] | codes[:, 1::2] << 4


def math_log2(x):
    return torch.tensor(x, dtype=torch.float64).log2().item()


class Marlin:
    """What ways.py's Vllm does with Marlin's layer in place of Triton's."""

    def __init__(self, way, case, copies):
        if case.get('activation') or case['format'] == 'mxfp4':
            raise ValueError('Marlin takes no matrices of these sizes')
        self.way, self.case = way, case
        self.run = importlib.import_module('vllm.model_executor.layers.fused_moe.experts.marlin_moe').fused_marlin_moe
        self.ops = importlib.import_module('vllm._custom_ops')
        self.utils = importlib.import_module('vllm.model_executor.layers.quantization.utils.marlin_utils')
        self.fp4 = importlib.import_module('vllm.model_executor.layers.quantization.utils.marlin_utils_fp4')
        types = importlib.import_module('vllm.scalar_type').scalar_types
        self.kind = types.float4_e2m1f if case['format'] == 'nvfp4' else types.uint4b8
        self.packed = {w: [self.pack(m) for m in (w.made13, w.made2)] for w in copies}
        self.workspace = torch.zeros(132 * 4, device='cuda', dtype=I32)

    def repacked(self, words, k, n):
        return self.ops.gptq_marlin_repack(words.T.contiguous(), torch.empty(0, dtype=I32, device='cuda'), k, n, 4)

    def pack(self, made):
        count, n, k = made.plain.shape
        codes, scales, whole = [], [], []
        for e in range(count):
            if made.codes is not None:
                codes.append(self.repacked(made.bytes_of(e).view(I32), k, n))
                own = self.utils.marlin_permute_scales(made.scales[e].T.to(BF16), k, n, 16)
                own, factor = self.fp4.nvfp4_marlin_process_scales(own)
                one = self.fp4.nvfp4_marlin_process_global_scale(torch.tensor(2.0 ** made.power, device='cuda', dtype=BF16))
                whole.append(one.float() / factor)
            else:
                parts = made.plain[e].float().view(n, k // 128, 128)
                own = (parts.abs().amax(2, keepdim=True) / 7).to(BF16)
                numbers = (parts / own.float()).round().clamp(-8, 7).view(n, k // 8, 8).to(torch.int64) + 8
                word = (numbers << 4 * torch.arange(8, device='cuda')).sum(2)
                codes.append(self.repacked(torch.where(word >= 2 ** 31, word - 2 ** 32, word).int(), k, n))
                own = self.utils.marlin_permute_scales(own.view(n, k // 128).T.contiguous(), k, n, 128)
            scales.append(own)
        return torch.stack(codes), torch.stack(scales), torch.stack(whole).view(-1) if whole else None

    def call(self, batch):
        gates, ids = self.way.route(batch)
        (q1, s1, g1), (q2, s2, g2) = self.packed[batch.weights]

        def summed(rows, out):
            self.ops.moe_sum(rows, out)
            return out
        return self.run(batch.x, q1, q2, None, None, s1, s2, gates, ids, quant_type_id=self.kind.id, global_num_experts=self.case['E'], global_scale1=g1,
                        global_scale2=g2, workspace=self.workspace, moe_sum=summed)


class TritonKernels:
    """OpenAI's path of gpt-oss: its routing, mxfp4 weights, its clamped SwiGLU inside the first product."""

    def __init__(self, case, copies):
        if case['format'] != 'mxfp4':
            raise ValueError('only mxfp4')
        ogs = importlib.import_module('triton_kernels.matmul_ogs')
        self.ogs, self.case = ogs, case
        self.metadata = importlib.import_module('triton_kernels.tensor').make_ragged_tensor_metadata
        self.topk = importlib.import_module('triton_kernels.topk').topk
        swiglu = importlib.import_module('triton_kernels.swiglu').swiglu_fn
        swizzle = importlib.import_module('vllm.model_executor.layers.quantization.utils.mxfp4_utils')._swizzle_mxfp4
        self.activation = ogs.FusedActivation(ogs.FnSpecs('swiglu', swiglu, ('alpha', 'limit'), reduction_n=2), (1.702, 7.0))
        inner = case['I']
        # It wants gate's and up's rows in turn.
        turns = torch.arange(2 * inner, device='cuda').view(2, inner).T.flatten()
        self.packed = {}
        for w in copies:
            both = []
            for made, order in ((w.made13, turns), (w.made2, slice(None))):
                codes = torch.stack([made.bytes_of(e, order) for e in range(case['E'])])
                values, flex, scale = swizzle(codes, made.scales[:, order].contiguous())
                both += [values, ogs.PrecisionConfig(weight_scale=scale, flex_ctx=ogs.FlexCtx(rhs_data=flex))]
            self.packed[w] = both

    def call(self, batch):
        ogs, k = self.ogs, self.case['k']
        w1, p1, w2, p2 = self.packed[batch.weights]
        sparse = self.topk(batch.logits(), k, apply_softmax=True)
        gather, scatter = sparse.mask_metadata.row_sorted_indx, sparse.mask_metadata.col_sorted_indx
        ragged = self.metadata(sparse.mask_metadata.col_sum, gather.shape[0])
        routing = ogs.RoutingData(sparse.vals.flatten()[scatter], ragged.slice_sizes, self.case['E'], k, ragged)
        h = ogs.matmul_ogs(batch.x, w1, None, routing, gather_indx=ogs.GatherIndx(scatter, gather), precision_config=p1, fused_activation=self.activation)
        return ogs.matmul_ogs(h, w2, None, routing, scatter_indx=ogs.ScatterIndx(gather, scatter), precision_config=p2, gammas=routing.gate_scal)
