#!/usr/bin/env python3
"""clang-tidy on sources of a compile database: lint.py JOBS DATABASE_FOLDER WORK_FOLDER [--each] FILE...

Most of clang-tidy's time goes into headers, so the files of a folder that are compiled alike are
read as one. What fails so, be it only for a name that two of them give to things of their own, is
read again file by file, and only that is reported. --each reads every file by itself from the start.
"""

import collections
import concurrent.futures
import json
import os
import shlex
import subprocess
import sys

TIDY = ["clang-tidy-19", "--quiet", "--extra-arg=-Wno-unknown-warning-option", "--extra-arg=-Wno-unknown-pragmas",
        "--extra-arg=-Wno-error"]


def tidy(database, path):
    """What clang-tidy finds in one source; empty if nothing."""
    done = subprocess.run([*TIDY, "-p", database, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return "" if done.returncode == 0 else done.stdout or done.stderr or f"clang-tidy ended with {done.returncode}\n"


def flags(command):
    """The options of a compile command, without the compiler and what names the one file."""
    words = shlex.split(command)
    first = next(i for i, word in enumerate(words) if word.startswith("-"))
    return tuple(words[first:words.index("-o")])


def batches(database, work, files):
    """Files of a folder compiled alike, as {source that includes them: files}; those left alone."""
    with open(os.path.join(database, "compile_commands.json")) as text:
        commands = {entry["file"]: entry["command"] for entry in json.load(text)}
    alike = collections.defaultdict(list)
    for path in files:
        alike[os.path.dirname(path), flags(commands[path])].append(path)
    made, alone, entries = {}, [], []
    os.makedirs(work, exist_ok=True)
    for (_, options), paths in alike.items():
        if len(paths) == 1:
            alone += paths
            continue
        batch = os.path.join(work, f"batch_{len(made)}.cpp")
        with open(batch, "w") as text:
            text.writelines(f'#include "{path}"  // NOLINT(bugprone-suspicious-include)\n' for path in paths)
        entries.append({"directory": work, "file": batch, "arguments": ["c++", *options, "-c", batch]})
        made[batch] = paths
    with open(os.path.join(work, "compile_commands.json"), "w") as text:
        json.dump(entries, text)
    return made, alone


def main():
    jobs, database, work, *files = sys.argv[1:]
    made, alone = {}, files
    if files and files[0] == "--each":
        alone = files[1:]
    else:
        made, alone = batches(database, work, files)
    found = []
    with concurrent.futures.ThreadPoolExecutor(int(jobs)) as pool:
        running = {pool.submit(tidy, work, batch): batch for batch in sorted(made, key=lambda b: -len(made[b]))}
        running.update({pool.submit(tidy, database, path): path for path in alone})
        while running:
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                path = running.pop(future)
                if not future.result():
                    continue
                if path in made:
                    running.update({pool.submit(tidy, database, one): one for one in made[path]})
                else:
                    found.append(future.result())
    sys.stdout.writelines(found)
    return 1 if found else 0


sys.exit(main())
