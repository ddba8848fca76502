#!/usr/bin/env python3
"""Grouped GEMMs of public libraries, timed beside Shunt's on the same GPU, in the same run.

    python3 bench/peers/gemm.py --shunt build/cuda/bin/shunt --json bench/results/h200/gemm-peers.json

`shunt bench gemm --grid` runs before the peers and after them, since a GPU's clock follows its heat; its time is the
mean of both. A peer is timed as the command times: nine samples of as long. A peer's result is compared with PyTorch in f32 first; one that is
wrong, refuses a shape or cannot be imported is named in "failed" and has no time. README.md beside this says more.
"""
import argparse
import functools
import importlib
import json
import math
import re
import subprocess
import tempfile
import time

from layers import table
from routing import graph_us, load_fbgemm
from versions import version
from ways import BF16, I32, quack_interface

import torch

F8 = torch.float8_e4m3fn
BLOCK = 128

# What Shunt multiplies; peers say with which of them they are compared.
KINDS = {
    'bf16': [],
    'fp8': ['--format', 'fp8_block', '--rows', 'fp8_block'],
    'fp8_row': ['--format', 'fp8_channel', '--rows', 'fp8_token'],  # a scale a row and a column
    'fp8_fast': ['--format', 'fp8_channel', '--rows', 'fp8_token', '--fast-accumulation'],  # sums stay in the tensor cores
}


# ---- data ----------------------------------------------------------------------------------------

class Case:
    """Groups of rows x [G M, K] and up to four copies of weights w [G, N, K], in bf16 or as fp8 with scales."""

    def __init__(self, label, kind):
        self.G, self.M, self.N, self.K = map(int, re.fullmatch(r'G(\d+) M(\d+) N(\d+) K(\d+)\b.*', label).groups())
        self.kind, self.fp8 = kind, kind != 'bf16'
        self.x = torch.randn(self.G * self.M, self.K, device='cuda', dtype=BF16)
        size = self.G * self.N * self.K * (1 if self.fp8 else 2)
        self.weights = []
        for _ in range(max(1, min(4, math.ceil(1e9 / size)))):
            w = torch.empty(self.G, self.N, self.K, device='cuda', dtype=BF16)
            for matrix in w:
                matrix.normal_(0, self.K ** -0.5)
            self.weights.append(w)
        self.ends = torch.arange(1, self.G + 1, device='cuda', dtype=I32) * self.M
        self.out = torch.empty(self.G * self.M, self.N, device='cuda', dtype=BF16)

    def check(self, out, w, groups):
        """The rows of some groups; fp8 has errors of a sixteenth at most in each number."""
        for g in groups:
            rows = slice(g * self.M, (g + 1) * self.M)
            want = self.x[rows].float() @ w[g].float().T
            error = ((out[rows].float() - want).norm() / want.norm()).item()
            if not error < (0.06 if self.fp8 else 0.01):
                raise AssertionError(f'relative error {error:.3g}')


def rounded(x, block):
    """fp8 and scales: one for the last dimension, or for `block` [rows, columns] of the last two."""
    if x.dim() == 3:  # a matrix at a time: what lies in between is in f32
        return tuple(torch.stack(parts) for parts in zip(*(rounded(matrix, block) for matrix in x)))
    shape = x.shape
    if block is None:
        scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        return (x.float() / scale).to(F8), scale.squeeze(-1)
    rows, columns = block
    tiles = x.float().view(shape[0] // rows, rows, shape[1] // columns, columns)
    scale = tiles.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / 448
    return (tiles / scale).to(F8).view(shape), scale.squeeze(3).squeeze(1)


# ---- peers: what is there before the clock runs, and a call --------------------------------------

class Torch:
    """torch._grouped_mm."""
    name, packages, kinds = 'torch', ('torch',), ('bf16',)

    def __init__(self, case):
        self.case = case

    def call(self, w):
        return torch._grouped_mm(self.case.x, w.transpose(1, 2), offs=self.case.ends)


class ByRows:
    """Before a way in bf16: rows and weights in fp8, a scale a row, and one a column of the output."""
    kinds = ('fp8', 'fp8_row', 'fp8_fast')

    def __init__(self, case):
        super().__init__(case)
        self.x = rounded(case.x, None)
        self.weights = {w: rounded(w, None) for w in case.weights}


class TorchScaled(ByRows, Torch):
    """torch._scaled_grouped_mm."""

    def call(self, w):
        matrix, scales = self.weights[w]
        return torch._scaled_grouped_mm(self.x[0], matrix.transpose(1, 2), self.x[1], scales, offs=self.case.ends, out_dtype=BF16,
                                        use_fast_accum=self.case.kind == 'fp8_fast')


class DeepGemm:
    """DeepGEMM as vLLM carries it: rows one group after the other where these are full tiles, else with room for 64 in each group."""
    name, packages, kinds = 'deepgemm', ('vllm',), ('bf16',)

    def __init__(self, case):
        self.case, self.module = case, importlib.import_module('vllm.third_party.deep_gemm')
        self.contiguous = case.M % BLOCK == 0
        self.room = case.M if self.contiguous else 64
        self.rows = case.x if self.contiguous else torch.zeros(case.G, self.room, case.K, device='cuda', dtype=BF16)
        if not self.contiguous:
            self.rows[:, :case.M] = case.x.view(case.G, case.M, case.K)
        self.groups = torch.arange(case.G, device='cuda', dtype=I32).repeat_interleave(case.M)
        self.counts = torch.full((case.G,), case.M, device='cuda', dtype=I32)
        self.out = torch.empty(*self.rows.shape[:-1], case.N, device='cuda', dtype=BF16)

    def multiply(self, rows, matrix, kind):
        if self.contiguous:
            getattr(self.module, f'm_grouped_{kind}_gemm_nt_contiguous')(rows, matrix, self.out, self.groups)
            return self.out
        getattr(self.module, f'm_grouped_{kind}_gemm_nt_masked')(rows, matrix, self.out, self.counts, self.case.M)
        return self.out[:, :self.case.M].reshape(-1, self.case.N) if self.checked else self.out

    checked = True  # whether rows are put together for a comparison

    def call(self, w):
        return self.multiply(self.rows, w, 'bf16')


class DeepGemmFp8(DeepGemm):
    """1 x 128 and 128 x 128 block scales, the rows' already in the order that it wants."""
    kinds = ('fp8',)

    def __init__(self, case):
        super().__init__(case)
        values, scales = rounded(self.rows.view(-1, case.K), (1, BLOCK))
        scales = scales.view(*self.rows.shape[:-1], -1)
        self.rows8 = (values.view(self.rows.shape), self.module.get_mn_major_tma_aligned_tensor(scales))
        self.weights = {w: rounded(w, (BLOCK, BLOCK)) for w in case.weights}

    def call(self, w):
        return self.multiply(self.rows8, self.weights[w], 'fp8')


class Quack:
    """quack's gemm over rows of unlike groups, its default tiles."""
    name, packages, kinds = 'quack', ('quack-kernels', 'nvidia-cutlass-dsl'), ('bf16',)

    def __init__(self, case):
        self.case, self.gemm = case, quack_interface().gemm
        self.starts = torch.arange(case.G + 1, device='cuda', dtype=I32) * case.M

    def call(self, w):
        return self.gemm(self.case.x, w.mT, cu_seqlens_m=self.starts, tuned=False)


class Fbgemm:
    """FBGEMM's CUTLASS kernels over rows one group after the other."""
    name, packages, kinds = 'fbgemm', ('fbgemm-gpu-genai',), ('bf16',)

    def __init__(self, case):
        self.case, self.ops = case, load_fbgemm()
        self.sizes = torch.full((case.G,), case.M, device='cuda', dtype=torch.int64)

    def call(self, w):
        return self.ops.bf16bf16bf16_grouped_stacked(self.case.x, w, self.sizes)


class FbgemmScaled(ByRows, Fbgemm):
    """Its sums always stay in the tensor cores."""

    def call(self, w):
        matrix, scales = self.weights[w]
        return self.ops.f8f8bf16_rowwise_grouped_stacked(self.x[0], matrix, self.x[1], scales, self.sizes)


class FbgemmTriton:
    """FBGEMM's Triton kernels, by the tiles that their own tuner picks; specialised warps where its Triton has them."""
    name, packages, kinds = 'fbgemm triton', ('fbgemm-gpu-genai',), ('bf16',)

    def __init__(self, case):
        self.case, self.module = case, importlib.import_module('fbgemm_gpu.experimental.gemm.triton_gemm.grouped_gemm')
        self.sizes = torch.full((case.G,), case.M, device='cuda', dtype=I32)

    def call(self, w):
        return self.module.grouped_gemm(self.case.x, w.flatten(0, 1), self.sizes)


class FbgemmTritonScaled(ByRows, FbgemmTriton):
    def call(self, w):
        matrix, scales = (part.flatten(0, 1) for part in self.weights[w])
        return self.module.grouped_gemm_fp8_rowwise(self.x[0], matrix, self.sizes, self.x[1], scales, use_fast_accum=self.case.kind == 'fp8_fast')


PEERS = [Torch, TorchScaled, DeepGemm, DeepGemmFp8, Quack, Fbgemm, FbgemmScaled, FbgemmTriton, FbgemmTritonScaled]


class Dense:
    """As many operations in one product, by cuBLAS: all rows with the first group's matrix. No grouped GEMM; for groups of many rows a ceiling."""
    name, packages, kinds = 'dense', ('torch',), ('bf16',)

    def __init__(self, case):
        self.case = case

    def call(self, w):
        return torch.mm(self.case.x, w[0].T)


class DenseScaled(Dense):
    """1 x 128 and 128 x 128 block scales, each side's in the order that cuBLAS takes."""
    kinds = ('fp8',)

    def __init__(self, case):
        super().__init__(case)
        self.x, scales = rounded(case.x, (1, BLOCK))
        self.scales = scales.T.contiguous().T
        self.weights = {w: rounded(w[0], (BLOCK, BLOCK)) for w in case.weights}

    def call(self, w):
        matrix, scales = self.weights[w]
        return torch._scaled_mm(self.x, matrix.T, scale_a=self.scales, scale_b=scales.T, out_dtype=BF16)


class DenseRows(Dense):
    """A scale a row and a column."""
    kinds = ('fp8_row', 'fp8_fast')

    def __init__(self, case):
        super().__init__(case)
        values, scales = rounded(case.x, None)
        self.x, self.scales = values, scales.unsqueeze(1)
        self.weights = {w: rounded(w[0], None) for w in case.weights}

    def call(self, w):
        matrix, scales = self.weights[w]
        return torch._scaled_mm(self.x, matrix.T, scale_a=self.scales, scale_b=scales.unsqueeze(0), out_dtype=BF16,
                                use_fast_accum=self.case.kind == 'fp8_fast')


CEILINGS = [Dense, DenseScaled, DenseRows]


# ---- all of it -----------------------------------------------------------------------------------

def shunt(options, kind):
    with tempfile.TemporaryDirectory() as folder:
        path = f'{folder}/shunt.json'
        subprocess.run([options.shunt, 'bench', 'gemm', '--device', 'cuda', '--grid', '--seconds', str(options.seconds), '--json', path, *KINDS[kind]],
                       check=True, stdout=subprocess.DEVNULL)
        with open(path, encoding='utf-8') as file:
            return json.load(file)


def time_peers(label, kind, options, failed, versions):
    """Microseconds of each peer, and of the dense product where groups have many rows."""
    case, timed = Case(label, kind), {}
    for Peer in PEERS + CEILINGS * (case.M >= 512):
        if kind not in Peer.kinds:
            continue
        try:
            peer = Peer(case)
            case.check(peer.call(case.weights[0]), case.weights[0], {0} if Peer in CEILINGS else {0, case.G // 2, case.G - 1})
            peer.checked = False
            timed[Peer.name] = graph_us([functools.partial(peer.call, w) for w in case.weights], options.seconds)
            versions.update({package: version(package) for package in Peer.packages})
        except ImportError as error:
            if all(Peer.name != other['peer'] for other in failed):
                failed.append({'op': 'grouped_gemm', 'peer': Peer.name, 'why': str(error)[:200]})
                print(f'-- {Peer.name} is left out: {error}', flush=True)
        except Exception as error:
            failed.append({'op': 'grouped_gemm', 'case': label, 'dtype': kind, 'peer': Peer.name,
                           'why': f'{type(error).__name__}: {str(error)[:200]}'})
            print(f'-- {label} {Peer.name}: {failed[-1]["why"]}', flush=True)
    return timed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--shunt', default='build/cuda/bin/shunt', help='the command (default: build/cuda/bin/shunt)')
    parser.add_argument('--json', required=True, help='where the report goes')
    parser.add_argument('--kinds', default='bf16,fp8', help=f'of {", ".join(KINDS)} (default: bf16,fp8)')
    parser.add_argument('--seconds', type=float, default=0.05, help='of samples of each case, a ninth each (default: 0.05)')
    parser.add_argument('--warm', metavar='CASE', help='only compute one case of one kind with every peer, for those that compile at first use')
    options = parser.parse_args()
    if unknown := set(options.kinds.split(',')) - set(KINDS):
        parser.error(f'--kinds: {", ".join(sorted(unknown))} is none of {", ".join(KINDS)}')
    if options.warm:
        if ',' in options.kinds:
            parser.error('--warm: --kinds must be one of them')
        options.seconds = 0
        print(options.warm, time_peers(options.warm, options.kinds, options, [], {}), flush=True)
        return
    began, report = time.monotonic(), None
    for kind in options.kinds.split(','):
        before = shunt(options, kind)
        if report is None:
            report = {'machine': before['machine'], 'ceilings': before['ceilings'], 'peer_versions': {}, 'failed': [], 'rows': []}
        peers = {}
        for row in before['rows']:
            peers[row['case']] = time_peers(row['case'], kind, options, report['failed'], report['peer_versions'])
            torch.cuda.empty_cache()
        for row, again in zip(before['rows'], shunt(options, kind)['rows']):
            us = [row['us'], again['us']]
            timed = peers[row['case']]
            words = ', '.join(f'{name} {table.microseconds(us)}' for name, us in timed.items())
            if Dense.name in timed:
                row['dense_us'] = timed.pop(Dense.name)
            row.update({'us': sum(us) / 2, 'share': row['floor_us'] / (sum(us) / 2), 'samples': us, 'peers': timed})
            report['rows'].append(row)
            print(f'{row["case"]} {row["dtype"]}: shunt {us[0]:.1f} and {us[1]:.1f}; {words}', flush=True)
        with open(options.json, 'w', encoding='utf-8') as file:
            json.dump(report, file, indent=1)
    print(f'{time.monotonic() - began:.0f} s', flush=True)


if __name__ == '__main__':
    main()
