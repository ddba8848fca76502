"""Cases of layers.py whose experts are fp8 with a scale for 128 x 128 weights, and who multiplies them: vLLM's Triton and DeepGEMM, SGLang's CUTLASS.

Weights are e4m3 numbers times powers of two, and the first of each block is 448, so that any rule finds these scales again in
the plain matrices that Shunt packs: every way multiplies the same numbers. Rows are rounded by each way itself, 128 at a time.
"""
import importlib
import os

import torch

BF16, F8, I32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32
CASES = {
    'qwen3-fp8': dict(name='Qwen3-30B-A3B', H=2048, I=768, E=128, k=8, format='fp8_block', rows=2, bits=8 + 32 / 16384, tolerance=.06,
                      tokens=['1', '4', '16', '64', '256', '1024', '8192', '8192z']),
    'dsv3-fp8': dict(name='DeepSeek-V3, 32 of 256 experts', H=7168, I=2048, E=32, k=1, format='fp8_block', rows=2, bits=8 + 32 / 16384, tolerance=.06,
                     tokens=['1', '64', '512', '4096']),
}


def by_rows(x):
    """e4m3 numbers of x [M, K] and a scale for each row, [M, 1]."""
    scales = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    return (x.float() / scales).to(F8), scales


class Matrix:
    """Matrices [E, N, K]: `codes` and `scales`, and `plain`, what they are worth, in bf16."""

    def __init__(self, count, rows, columns):
        self.plain = torch.empty(count, rows, columns, device='cuda', dtype=BF16)
        self.codes = torch.empty(count, rows, columns, device='cuda', dtype=F8)
        self.scales = torch.empty(count, rows // 128, columns // 128, device='cuda')
        for e in range(count):
            w = torch.empty(rows, columns, device='cuda').normal_(0, columns ** -0.5).view(rows // 128, 128, columns // 128, 128)
            scales = torch.exp2((w.abs().amax((1, 3), keepdim=True) / 448).log2().ceil())
            codes = (w / scales).to(F8).float()
            codes[:, 0, :, 0] = 448
            self.plain[e] = (codes * scales).view(rows, columns)
            self.codes[e], self.scales[e] = codes.view(rows, columns), scales[:, 0, :, 0]


class Triton:
    """fused_experts of vLLM, with the package's tuned file where it has one."""
    name = 'vllm fused_experts'

    def __init__(self, way, case, copies):
        self.way, self.case = way, case
        config = importlib.import_module('vllm.model_executor.layers.fused_moe.config').fp8_w8a8_moe_quant_config
        self.configs = {w: config(w1_scale=w.made13.scales, w2_scale=w.made2.scales, block_shape=[128, 128]) for w in copies}
        if way.fused.get_moe_configs(case['E'], case['I'], 'fp8_w8a8', 128, 128) is None:
            self.name += ', no tuned file'

    def call(self, batch):
        gates, ids = self.way.route(batch)
        w = batch.weights
        return self.way.fused.fused_experts(batch.x, w.made13.codes, w.made2.codes, gates, ids, quant_config=self.configs[w])


class DeepGemm(Triton):
    """vLLM's DeepGemmExperts: its rounding, permutation and activation around DeepGEMM's products of rows in padded groups."""

    def __init__(self, way, case, copies):
        super().__init__(way, case, copies)
        self.name = 'vllm deepgemm'
        layers = 'vllm.model_executor.layers.fused_moe.'
        experts = importlib.import_module(layers + 'experts.deep_gemm_moe').DeepGemmExperts
        self.silu = importlib.import_module(layers + 'activation').MoEActivation.SILU
        self.round = importlib.import_module(layers + 'utils').moe_kernel_quantize_input
        importlib.import_module('vllm.utils.deep_gemm').get_mk_alignment_for_contiguous_layout()
        self.experts = {}
        for w in copies:
            one = experts.__new__(experts)
            one.quant_config, one.mxfp8, one.gemm1_clamp_limit, one.gemm1_alpha, one.gemm1_beta = self.configs[w], False, None, 1.0, 0.0
            self.experts[w] = one

    def call(self, batch):
        gates, ids = self.way.route(batch)
        case, w, count = self.case, batch.weights, len(batch.x)
        one = self.experts[w]
        first, second, out = one.workspace_shapes(count, 2 * case['I'], case['H'], case['k'], case['E'], case['E'], None, self.silu)
        rows, scales = self.round(batch.x, None, F8, False, [128, 128])
        first, second, out = (torch.empty(shape, device='cuda', dtype=BF16) for shape in (first, second, out))
        one.apply(out, rows, w.made13.codes, w.made2.codes, gates, ids, self.silu, case['E'], None, scales, None, first, second, None, False)
        return out


class SGLang:
    """The operators of SGLang's cutlass_fused_experts_fp8, from its wheel of kernels, in its order, and its choice of experts."""
    name = 'sglang cutlass'

    def __init__(self, way, case, copies):
        self.case = case
        if not hasattr(torch.ops.sgl_kernel, 'fp8_blockwise_scaled_grouped_mm'):
            for folder in filter(None, os.environ.get('PEERS_SITE', '').split(':')):
                if os.path.exists(f'{folder}/sgl_common_ops.abi3.so'):
                    torch.ops.load_library(f'{folder}/sgl_common_ops.abi3.so')
                    break
            else:
                importlib.import_module('sgl_kernel')
        self.op = torch.ops.sgl_kernel
        experts, hidden, inner = case['E'], case['H'], case['I']
        self.strides = [torch.full((experts,), n, device='cuda', dtype=torch.int64) for n in (hidden, 2 * inner, inner, hidden)]
        self.pointers = [torch.empty(experts, device='cuda', dtype=torch.int64) for _ in range(5)]
        self.scratch = torch.empty(90000, device='cuda', dtype=torch.uint8)
        self.offsets = torch.empty(experts + 1, device='cuda', dtype=I32)
        self.problems = [torch.empty(experts, 3, device='cuda', dtype=I32) for _ in range(2)]
        self.layouts = [torch.empty(experts, 5, device='cuda', dtype=I32) for _ in range(2)]
        # It wants [K, N] views of matrices and of scales.
        self.views = {w: [t.transpose(1, 2) for t in (w.made13.codes, w.made2.codes, w.made13.scales, w.made2.scales)] for w in copies}

    def rounded(self, x):
        rows, scales = torch.empty_like(x, dtype=F8), torch.empty(len(x), x.shape[1] // 128, device='cuda')
        self.op.sgl_per_token_group_quant_8bit(x, rows, scales, 128, 1e-10, -448.0, 448.0, False)
        return rows, scales

    def multiply(self, out, rows, weights, row_scales, scales, k, n, problems):
        self.op.fp8_blockwise_scaled_grouped_mm(out, *self.pointers, rows, weights, row_scales, scales, self.strides[k], self.strides[k], self.strides[n],
                                                *self.layouts, problems, self.offsets[:-1], self.scratch)

    def call(self, batch):
        case, op, x = self.case, self.op, batch.x
        pairs, hidden, inner = len(x) * case['k'], case['H'], case['I']
        gates, ids = torch.empty(len(x), case['k'], device='cuda'), torch.empty(len(x), case['k'], device='cuda', dtype=I32)
        op.topk_softmax(gates, ids, batch.logits(), True, 0.0, None)
        from_row, to_row = (torch.empty(pairs, device='cuda', dtype=I32) for _ in range(2))
        op.prepare_moe_input(ids, self.offsets, None, *self.problems, from_row, to_row, case['E'], inner, hidden)
        codes, code_scales = self.rounded(x)
        rows, row_scales = torch.empty(pairs, hidden, device='cuda', dtype=F8), torch.empty(pairs, hidden // 128, device='cuda')
        op.shuffle_rows(codes, from_row, rows)
        op.shuffle_rows(code_scales, from_row, row_scales)
        w13, w2, s13, s2 = self.views[batch.weights]
        both, h, y = (torch.empty(pairs, n, device='cuda', dtype=BF16) for n in (2 * inner, inner, hidden))
        out = torch.empty_like(x)
        self.multiply(both, rows, w13, row_scales, s13, 0, 1, self.problems[0])
        op.silu_and_mul(h, both)
        rows, row_scales = self.rounded(h)
        self.multiply(y, rows, w2, row_scales, s2, 2, 3, self.problems[1])
        op.apply_shuffle_mul_sum(y, out, to_row, gates.to(BF16))
        return out
