#!/usr/bin/env python3
"""Whole layers of public libraries, timed beside Shunt's on the same GPU: one process, one set of weights and tokens.

    python3 bench/peers/layers.py --library build/shared/libshunt.so --shunt build/cuda/bin/shunt --json layers.json

Shunt is called through its C ABI and so is one way among others: README.md beside this says which others there are and
how all of them are timed, in turn. Every way starts from hidden states, routes them itself and ends with the layer's
output. Each is compared with PyTorch in f32 first; one that is wrong, refuses a shape or cannot be imported is named in
"failed" and has no time. A JSON that is there is added to, so that cases may be spread over several runs.
"""
import argparse
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
from versions import version  # noqa: E402  bench/peers/versions.py
from ways import BF16, FP8_WAYS, PACKED_WAYS, WAYS, NotForThis, Shunt, eager_us  # noqa: E402  bench/peers/ways.py

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

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
    router = 0 if case['from'] == 'logits' else case['E'] * case['H']
    given = tokens * case['E'] if case['from'] == 'logits' else 0
    moved = hit * matrices * case.get('bits', 16) / 8 + 2 * (shared + router + given + 2 * tokens * case['H'])
    done = 2 * tokens * (case['k'] * matrices + shared + router)
    rate = limits['bf16_TFLOPs'] * (2 if case.get('rows') else 1)  # fp8 rows: twice as many a clock
    us = max(limits['read_start_us'] + moved / limits['read_GBps'] / 1e3, done / rate / 1e6)
    return us, moved, done


# ---- timing --------------------------------------------------------------------------------------

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


class Dense:
    """As many operations as experts take in two products, by cuBLAS: all of their rows with one expert's matrices, and nothing around them. No layer."""
    name = 'dense'

    def __init__(self, case, tokens, copies):
        self.rows = torch.randn(tokens * case['k'], case['H'], device='cuda', dtype=BF16)
        self.inner = torch.randn(tokens * case['k'], case['I'], device='cuda', dtype=BF16)

    def call(self, batch):
        return torch.mm(self.rows, batch.weights.w13[0].T), torch.mm(self.inner, batch.weights.w2[0].T)


class DenseFp8(Dense):
    """The same in fp8, by torch._scaled_mm: a scale a row and a column, rows rounded beforehand, sums left in the tensor cores."""

    def __init__(self, case, tokens, copies):
        super().__init__(case, tokens, copies)
        self.sides = [fp8.by_rows(self.rows), fp8.by_rows(self.inner)]
        self.weights = {w: [fp8.by_rows(w.w13[0]), fp8.by_rows(w.w2[0])] for w in copies}

    def call(self, batch):
        return [torch._scaled_mm(x, matrix.T, scale_a=scales, scale_b=columns.T, out_dtype=BF16, use_fast_accum=True)
                for (x, scales), (matrix, columns) in zip(self.sides, self.weights[batch.weights])]


CEILINGS = {'bf16': Dense, 'fp8_block': DenseFp8}


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
    if row['dtype'] in CEILINGS and tokens * case['k'] >= 128 * case['E']:
        try:
            timed[Dense.name] = Timed(CEILINGS[row['dtype']](case, tokens, copies).call, batches, stream)
        except Exception as error:
            report['failed'].append({'op': 'layer', 'case': label, 'peer': Dense.name, 'why': f'{type(error).__name__}: {str(error)[:200]}'})
            print(f'-- {label} {Dense.name}: {report["failed"][-1]["why"]}', flush=True)
    for _ in range(options.rounds):  # in turn: the clock that one leaves is the next one's
        for way in timed.values():
            way.sample()
    for name, way in timed.items():
        row['samples'][name] = [round(us, 2) for us in way.samples]
        if name == 'shunt':
            row['us'], row['share'] = way.median(), row['floor_us'] / way.median()
        elif name == Dense.name:
            row['dense_us'] = way.median()
        else:
            row['peers'][name] = way.median()
    row['peers'].update(eager)
    if row['us'] is not None:
        report['rows'] = [other for other in report['rows'] if (other['case'], other['dtype']) != (label, row['dtype'])] + [row]
    words = ', '.join(f'{name} {table.microseconds(us)}' for name, us in row['peers'].items())
    if 'dense_us' in row:
        words = f'dense {table.microseconds(row["dense_us"])}; {words}'
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
