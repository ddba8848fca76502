#!/usr/bin/env python3
"""What a layer's kernels are bound by: clocks and power of the GPU while `shunt bench` runs, and of each kernel the time
and how much of memory, the L2 and the tensor cores it uses.

    python3 bench/kernel_times.py --shunt build/cuda/bin/shunt -- layer --model qwen3-30b-a3b --tokens 1024 --from logits

What follows `--` goes to `shunt bench`, on the GPU and with dependent launches. Clocks and power are sampled by
nvidia-smi every 20 ms over the last second of a run of 3; kernels are profiled by Nsight Compute (ncu), one after the
other, each by itself, with clocks as they are and caches as the kernel before leaves them. --csv FILE reads what ncu wrote
instead of running it.
"""
import argparse
import csv
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

# Of a layer, and not what lays weights out before it runs (read_rows, write_rows).
KERNELS = ('route|gate|order|sort|few|many|one|move_|spread|quantise|norm_rows|dot_rows|round_rows|finish|copy_both|fragments|'
           'segments|stream|activate|combine')
METRICS = {
    'gpu__time_duration.sum': 'us',
    'dram__throughput.avg.pct_of_peak_sustained_elapsed': 'memory %',
    'lts__throughput.avg.pct_of_peak_sustained_elapsed': 'L2 %',
    'sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed': 'tensor %',
    'sm__inst_issued.avg.pct_of_peak_sustained_elapsed': 'issue %',
    'dram__bytes_read.sum': 'MB read',
    'dram__bytes_write.sum': 'MB written',
    'smsp__cycles_elapsed.avg.per_second': 'GHz',
}
SCALES = {'ns': 1e-3, 'nsecond': 1e-3, 'us': 1, 'usecond': 1, 'ms': 1e3, 'msecond': 1e3, 's': 1e6, 'second': 1e6,
          'byte': 1e-6, 'Kbyte': 1e-3, 'Mbyte': 1, 'Gbyte': 1e3, 'hz': 1e-9, 'Hz': 1e-9, 'Khz': 1e-6, 'Mhz': 1e-3, 'Ghz': 1,
          'MHz': 1e-3, 'GHz': 1, 'cycle/second': 1e-9, 'cycle/nsecond': 1, 'cycle/usecond': 1e-3, '%': 1}


def found(tool):
    if shutil.which(tool) is None:
        sys.exit(f'kernel_times.py: {tool} is not on the PATH: it must be, on a machine with an NVIDIA GPU')
    return tool


def bench(options, seconds):
    return [options.shunt, 'bench', *options.arguments, '--device', 'cuda', '--dependent-launch', '--seconds', str(seconds)]


def clocks(options):
    """The GPU's clock and power in the last second of a run: prints the least, median and largest, and the cause of a limit."""
    fields = 'clocks.sm,power.draw.instant,clocks_event_reasons.sw_power_cap,clocks_event_reasons.sw_thermal_slowdown'
    with tempfile.TemporaryFile('w+') as out:
        sampler = subprocess.Popen([found('nvidia-smi'), f'--query-gpu={fields}', '--format=csv,noheader,nounits', '-lms', '20'],
                                   stdout=out)
        try:
            ran = subprocess.run(bench(options, 3), capture_output=True, text=True)
        finally:
            sampler.terminate()
            sampler.wait()
        if ran.returncode != 0:
            sys.exit(f'kernel_times.py: shunt bench ended with {ran.returncode}:\n{ran.stderr or ran.stdout}')
        out.seek(0)
        samples = clock_samples(out)
    print(*(line for line in ran.stdout.splitlines() if re.match(r'(layer|grouped_gemm) ', line)), sep='\n')
    print(clock_words(samples[-60:-5] or samples))


def clock_samples(lines):
    samples = []
    for line in lines:
        parts = [part.strip() for part in line.split(',')]
        if len(parts) == 4 and parts[0].isdigit():
            samples.append((int(parts[0]), float(parts[1]), parts[2] == 'Active', parts[3] == 'Active'))
    return samples


def clock_words(samples):
    if not samples:
        return 'no clocks were sampled'
    mhz = sorted(sample[0] for sample in samples)
    watts = statistics.mean(sample[1] for sample in samples)
    capped, hot = (sum(sample[i] for sample in samples) for i in (2, 3))
    return (f'{mhz[0]}, {statistics.median(mhz):.0f}, {mhz[-1]} MHz (least, median, largest) at {watts:.0f} W; '
            f'of {len(samples)} samples {capped} limited by power, {hot} by heat')


def kernels(lines):
    """[(name, grid, {metric: value})] of ncu's CSV, in the order of launches."""
    launches = {}
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        title = METRICS.get(row['Metric Name'])
        if title is None:
            continue
        value = float(row['Metric Value'].replace(',', '')) * SCALES.get(row['Metric Unit'], 1)
        name = re.sub(r'[(<].*', '', re.sub(r'\((anonymous namespace)\)|<unnamed>', '', row['Kernel Name']))
        name = re.split(r'::|\s', name)[-1]
        launches.setdefault(row['ID'], (name, row['Grid Size'], {}))[2][title] = value
    return list(launches.values())


def profile(options):
    with tempfile.NamedTemporaryFile('w+') as out:
        command = [found('ncu'), '--clock-control', 'none', '--cache-control', 'none', '--kernel-name', f'regex:{KERNELS}',
                   '--launch-skip', str(options.skip), '--launch-count', str(options.count), '--csv', '--metrics',
                   ','.join(METRICS), *bench(options, 0.02)]
        ran = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True)
        out.seek(0)
        lines = out.readlines()
    if ran.returncode != 0:
        sys.exit(f'kernel_times.py: ncu ended with {ran.returncode}:\n{ran.stderr}{"".join(lines[-20:])}')
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--shunt', default='build/cuda/bin/shunt', help='the command')
    parser.add_argument('--skip', type=int, default=12, help='launches of a layer that are not profiled (default: 12)')
    parser.add_argument('--count', type=int, default=8, help='launches that are (default: 8)')
    parser.add_argument('--csv', help="ncu's output, instead of running anything")
    parser.add_argument('arguments', nargs='*', help='of shunt bench')
    options = parser.parse_args()
    if options.csv:
        with open(options.csv) as file:
            lines = file.readlines()
    else:
        if not options.arguments:
            parser.error('arguments are missing: what shunt bench is to time, behind --')
        clocks(options)
        lines = profile(options)
    rows = kernels(lines)
    if not rows:
        sys.exit('kernel_times.py: ncu profiled no kernel: none of that name was launched so often')
    titles = [title for title in METRICS.values() if any(title in values for _, _, values in rows)]
    print(f'\n| kernel | grid | {" | ".join(titles)} |\n|---|---|{"---|" * len(titles)}')
    for name, grid, values in rows:
        print(f'| {name} | {grid} | {" | ".join(f"{values[t]:.4g}" if t in values else "" for t in titles)} |')


if __name__ == '__main__':
    main()
