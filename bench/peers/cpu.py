#!/usr/bin/env python3
"""Shunt's layer on a CPU beside ggml's (llama.cpp's), in turn in the same run.

    python3 bench/peers/cpu.py --shunt build/release/bin/shunt --ggml build/ggml/ggml_layer --json cpu.json

Each case: `shunt bench layer`, then ggml_layer with its nearest type over the same shape, threads and bytes that
rotate, and again, --rounds times. A row is Shunt's of the round with the median time; ggml's time is the median of its
rounds, the faster of its own layout and those it repacks weights into.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import table  # noqa: E402  bench/table.py

# Of Shunt: options of `shunt bench layer`; of ggml: the type with as many bits.
CASES = {
    'f32': (['--dtype', 'f32'], 'f32'),
    'bf16': (['--dtype', 'bf16'], 'bf16'),
    'int8': (['--format', 'int8'], 'q8_0'),
    'int4': (['--format', 'int4:32'], 'q4_0'),
    'mxfp4': (['--format', 'mxfp4'], 'mxfp4'),
    'nvfp4': (['--format', 'nvfp4'], 'nvfp4'),
}
SHAPE = {'experts': 128, 'top-k': 8, 'hidden': 2048, 'intermediate': 768}  # Qwen3-30B-A3B


def middle(values, key=lambda value: value):
    return sorted(values, key=key)[len(values) // 2]


def run_shunt(case, options):
    with tempfile.TemporaryDirectory() as folder:
        path = f'{folder}/shunt.json'
        command = [options.shunt, 'bench', 'layer', '--tokens', options.tokens, '--threads', str(options.threads),
                   '--seconds', str(options.seconds), '--json', path, *CASES[case][0]]
        for name, size in SHAPE.items():
            command += [f'--{name}', str(size)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with open(path, encoding='utf-8') as file:
            return json.load(file)


def run_ggml(case, options, rotate_bytes):
    """Its version, and microseconds by number of tokens."""
    command = [options.ggml, CASES[case][1], *(str(size) for size in SHAPE.values()), str(options.threads),
               str(rotate_bytes), str(options.seconds), *options.tokens.split(',')]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f'{" ".join(command)}: {done.stderr.strip()[-300:]}')
    version, *lines = done.stdout.splitlines()
    best = {}
    for line in lines:
        _, tokens, us = line.split()
        best[tokens] = min(best.get(tokens, float('inf')), float(us))
    return version.removeprefix('ggml '), best


def time_case(case, options):
    """The case's report, with its rows beside ggml's."""
    ours, theirs = [], []
    for _ in range(options.rounds):
        ours.append(run_shunt(case, options))
        version, times = run_ggml(case, options, ours[-1]['rotate_bytes'])
        theirs.append(times)
    rows = []
    for i, tokens in enumerate(options.tokens.split(',')):
        row = middle([report['rows'][i] for report in ours], key=lambda row: row['us'])
        row['case'] += f' {CASES[case][0][-1]}'
        row['peers'] = {f'ggml {CASES[case][1]}': middle([times[tokens] for times in theirs])}
        rows.append(row)
        print(f'{row["case"]}: shunt {table.microseconds(row["us"])} us ({100 * row["share"]:.0f} %); '
              f'ggml {CASES[case][1]} {table.microseconds(row["peers"][f"ggml {CASES[case][1]}"])} us', flush=True)
    return dict(ours[-1], rows=rows, peer_versions={'ggml': version})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--shunt', default='build/release/bin/shunt', help='the command (default: build/release/bin/shunt)')
    parser.add_argument('--ggml', required=True, help='the program ggml_layer')
    parser.add_argument('--json', required=True, help='where the report goes')
    parser.add_argument('--cases', default=','.join(CASES), help=f'with commas between (default: {",".join(CASES)})')
    parser.add_argument('--tokens', default='1,16,256', help='with commas between (default: 1,16,256)')
    parser.add_argument('--threads', type=int, default=len(os.sched_getaffinity(0)), help='of each (default: every core)')
    parser.add_argument('--seconds', type=float, default=1, help='of measuring a case (default: 1)')
    parser.add_argument('--rounds', type=int, default=3, help='(default: 3)')
    options = parser.parse_args()
    unknown = [case for case in options.cases.split(',') if case not in CASES]
    if unknown:
        parser.error(f'--cases: {unknown[0]} is none of {", ".join(CASES)}')

    report = None
    for case in options.cases.split(','):
        of_case = time_case(case, options)
        if report is None:
            report = of_case
        else:
            report['rows'] += of_case['rows']
        with open(options.json, 'w', encoding='utf-8') as file:
            json.dump(report, file, indent=1)


if __name__ == '__main__':
    main()
