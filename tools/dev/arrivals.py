#!/usr/bin/env python3
"""Which kernels arrive at a barrier before what they loaded from shared memory is in registers.

    tools/dev/arrivals.py build/cuda/libshunt.a

An arrival does not wait for loads before it. A store that it allows queues behind them; a bulk copy
does not, and they may read what it writes (docs/notes/cuda-fp8.md, "A load that an arrival passed").
Reads the control bits of sm_90a code: needs cuobjdump and nvdisasm of the CUDA toolkit. Code is
followed as it lies, not along branches, and loads of a warp are taken to be answered in order.
"""
import pathlib
import re
import subprocess
import sys
import tempfile

# Whose barriers allow stores only, or whose pending loads are of what is not given up yet: by how
# names of kernels begin, and of which form all these loads are.
HARMLESS = {
    "few_fragments<FewFragments<Lane<(Codes)8,": ("dense3's look-ups in a table that stays", r"LDS R\d+, \[R\d+\+UR\d+\]"),
    "many_rows": ("lists and scales that other warps store", ""),
    "middle_fragments": ("loads of the stage that follows", ""),
    "many_fragments": ("loads of the stage that follows", ""),
}
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+ )?\s*(.*?)\s*/\* 0x[0-9a-f]{16} \*/")
SECOND_WORD = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")


def findings(cubin):
    """{kernel: [(address, arrival, loads that nobody has waited for)]}"""
    run = subprocess.run(["nvdisasm", "-hex", "-c", cubin], capture_output=True, text=True, check=True)
    lines, found, kernel, pending = run.stdout.split("\n"), {}, "", []
    for line, after in zip(lines, lines[1:]):
        if match := re.match(r"\.text\.(\S+):", line):
            kernel, pending = match.group(1), []
        match, second = INSTRUCTION.search(line), SECOND_WORD.match(after)
        if not match or not second:
            continue
        # Bits 41 and up of the second word: stall 4, yield 1, barrier written 3, read 3, waited 6.
        control = int(second.group(1), 16) >> 41
        for barrier in range(6):
            if control >> (11 + barrier) & 1:
                last = [i for i, (_, written) in enumerate(pending) if written == barrier]
                del pending[: last[-1] + 1 if last else 0]
        text = match.group(2)
        if text.startswith("LDS") and not re.match(r"LDS\S* RZ,", text):
            pending.append((text, control >> 5 & 7))
        elif text.startswith("SYNCS.ARRIVE") and pending:
            found.setdefault(kernel, []).append((match.group(1), text, [load for load, _ in pending]))
        elif re.match(r"(EXIT|BRA|RET)\b", text) and "@" not in line.split("*/")[1]:
            pending = []
    return found


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    library = pathlib.Path(sys.argv[1]).resolve()
    bad = kernels = 0
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["cuobjdump", "-xelf", "all", library], cwd=folder, check=True, capture_output=True)
        cubins = sorted(pathlib.Path(folder).glob("*sm_90a.cubin"))
        if not cubins:
            sys.exit(f"{library}: no code for sm_90a")
        for cubin in cubins:
            for kernel, arrivals in findings(cubin).items():
                name = subprocess.run(["c++filt", kernel], capture_output=True, text=True).stdout
                name = re.sub(r"shunt::cuda_engine::|\(anonymous namespace\)::|^void ", "", name).strip()
                name = name.rsplit("(", 1)[0]
                kernels += 1
                reason, form = next((HARMLESS[of] for of in HARMLESS if name.startswith(of)), ("", ""))
                if reason and all(re.match(form, load) for _, _, loads in arrivals for load in loads):
                    print(f"{name}: {len(arrivals)}, harmless: {reason}")
                    continue
                bad += 1
                print(f"{name}:")
                for address, arrival, loads in arrivals:
                    print(f"  {address}: {arrival} before the value of {', '.join(loads)}")
    print(f"{len(cubins)} files, {kernels} kernels arrive early, {bad} of them not known to be harmless")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
