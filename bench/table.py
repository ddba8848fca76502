#!/usr/bin/env python3
"""Results of `shunt bench --json` and of bench/peers as Markdown tables, one an operation.

    python3 bench/table.py FILE.json                           prints them
    python3 bench/table.py FILE.json --op gate --best          one operation, only the fastest peer
    python3 bench/table.py --into docs/performance.md          renews what stands in that page between
        <!-- table: bench/results/h200/routing.json --op gate -->
        <!-- end of table -->
"""
import argparse
import json
import re
import shlex
import sys

HEADINGS = {
    'route': 'Router, from hidden states', 'gate': 'Gate, from logits', 'order': 'Ordering of given ids',
    'shuffle': 'Index shuffling: top-k of given scores, ordered', 'gather': 'Gather', 'activate': 'Activate', 'combine': 'Combine',
    'combine_shuffling': 'From the order of ranks to that of experts', 'split_shuffling': 'From the order of experts to that of ranks',
    'scatter_add': 'Added back to tokens', 'chain': 'Route, order, gather, combine', 'grouped_gemm': 'Grouped GEMM',
    'indexed_gemm': 'Matrices that ids pick', 'layer': 'The whole layer',
}


def microseconds(value):
    """Three significant digits."""
    if value is None:
        return ''
    return f'{value:.0f}' if value >= 99.95 else f'{value:.1f}' if value >= 9.995 else f'{value:.2f}'


def groups_of(rows):
    """Rows by operation and kind of case ("T64 E128 k8 tile 16" is another than "T64 E128 k8"), in their order."""
    found = {}
    for row in rows:
        kind = re.sub(r'\d+', '', row['case'])
        found.setdefault(row['op'], {}).setdefault(kind, []).append(row)
    return {op: list(kinds.values()) for op, kinds in found.items()}


def table(rows, best):
    """A table of rows; `best` leaves one column with the fastest peer and its name. Peers of few rows share a column."""
    count = {}
    for row in rows:
        for name in row.get('peers', {}):
            count[name] = count.get(name, 0) + 1
    names = [name for name in count if 2 * count[name] >= len(rows)]
    others = [name for name in count if name not in names]
    heading = ['case', 'dtype', 'Shunt, us', 'floor, us', 'share']
    dense = any('dense_us' in row for row in rows)
    heading += ['dense by cuBLAS, us'] * dense
    if best and count:
        heading += ['best peer, us', 'times faster']
    else:
        heading += names + ['others'] * bool(others)
    lines = ['| ' + ' | '.join(heading) + ' |', '|' + '---|' * len(heading)]
    for row in rows:
        cells = [row['case'], row['dtype'], microseconds(row['us']), microseconds(row['floor_us']), f'{100 * row["share"]:.0f} %']
        if dense:
            cells.append(f'{microseconds(row["dense_us"])}, {100 * row["dense_us"] / row["us"]:.0f} %' if 'dense_us' in row else '')
        peers = row.get('peers', {})
        if best and count:
            name = min(peers, key=peers.get, default=None)
            cells += [f'{microseconds(peers[name])} ({name})', f'{peers[name] / row["us"]:.1f}'] if name else ['', '']
        else:
            cells += [microseconds(peers.get(name)) for name in names]
            if others:
                cells.append('; '.join(f'{name} {microseconds(peers[name])}' for name in others if name in peers))
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def megabytes(value):
    """Three significant digits at least, of 10^6 bytes."""
    return '' if value is None else f'{value / 1e6:.0f}' if value >= 1e8 else f'{value / 1e6:.3g}'


def memory_table(rows):
    """What calls take beside inputs, outputs and weights."""
    names = list(dict.fromkeys(name for row in rows for name in row.get('peer_workspace_bytes', {})))
    lines = ['| ' + ' | '.join(['case', 'dtype', 'Shunt, MB'] + [f'{name}, MB' for name in names]) + ' |', '|' + '---|' * (3 + len(names))]
    for row in rows:
        cells = [row['case'], row['dtype'], megabytes(row.get('workspace_bytes'))]
        cells += [megabytes(row['peer_workspace_bytes'].get(name)) for name in names]
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def summary(report):
    """The machine and its ceilings, one line."""
    machine, limits = report['machine'], report['ceilings']
    text = machine.get('gpu') or machine.get('cpu', '')
    if 'cuda_driver' in machine:
        text += f', driver for CUDA {machine["cuda_driver"]}'
    if 'date' in machine:
        text += f', {machine["date"]}'
    if 'launch_us' in limits:
        text += f'; a launch {limits["launch_us"]:.2f} us, a launch that reads {limits["read_start_us"]:.2f} us + bytes / {limits["read_GBps"] / 1e3:.2f} TB/s'
        if 'mixes' in limits:
            rates = {round(mix['written'], 2): mix['GBps'] / 1e3 for mix in limits['mixes']}
            text += ', of which a ninth writes {:.2f}, half {:.2f}, eight ninths {:.2f}, all {:.2f} TB/s'.format(*rates.values())
        else:
            text += f', copies {limits["copy_GBps"] / 1e3:.2f} TB/s'
    if 'bf16_TFLOPs' in limits:
        text += f', bf16 {limits["bf16_TFLOPs"]:.0f} TFLOP/s'
    if versions := report.get('peer_versions'):
        text += '. Peers: ' + ', '.join(f'{name} {version}' for name, version in versions.items())
    return text + '.'


def render(arguments):
    """The tables that a line of arguments asks for."""
    parser = argparse.ArgumentParser(prog='table')
    parser.add_argument('file')
    parser.add_argument('--op', default='', help='operations, with commas between')
    parser.add_argument('--best', action='store_true', help='only the fastest peer of each case')
    parser.add_argument('--memory', action='store_true', help='the memory that calls take, instead of times')
    wanted = parser.parse_args(arguments)
    with open(wanted.file, encoding='utf-8') as file:
        report = json.load(file)
    ops = [op for op in wanted.op.split(',') if op]
    parts = [summary(report)]
    for op, kinds in groups_of(report['rows']).items():
        if ops and op not in ops:
            continue
        parts += [f'**{HEADINGS.get(op, op)}**'] if len(ops) != 1 else []
        if wanted.memory:
            parts.append(memory_table([row for rows in kinds for row in rows if row.get('workspace_bytes')]))
        else:
            parts += [table(rows, wanted.best) for rows in kinds]
    return '\n\n'.join(parts)


def renew(page):
    """Replaces every table of a page by what its comment asks for."""
    with open(page, encoding='utf-8') as file:
        text = file.read()
    mark = re.compile(r'(<!-- table: (.*?) -->\n).*?(<!-- end of table -->)', re.S)
    text, count = mark.subn(lambda m: m[1] + render(shlex.split(m[2])) + '\n' + m[3], text)
    if count == 0:
        sys.exit(f'table.py: {page} has no <!-- table: FILE.json --> .. <!-- end of table -->')
    with open(page, 'w', encoding='utf-8') as file:
        file.write(text)
    print(f'{page}: {count} table{"" if count == 1 else "s"}')


if __name__ == '__main__':
    if len(sys.argv) == 3 and sys.argv[1] == '--into':
        renew(sys.argv[2])
    elif len(sys.argv) < 2 or sys.argv[1] in ('-h', '--help'):
        sys.exit(__doc__)
    else:
        print(render(sys.argv[1:]))
