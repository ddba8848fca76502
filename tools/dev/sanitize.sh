#!/usr/bin/env bash
# sanitize.sh FOLDER [TOOL]: the CUDA kernels' tests in FOLDER (test_gemm and so on, built for this machine's GPU) under
# compute-sanitizer: memcheck, racecheck, initcheck or synccheck. Each room at once; ends with how many found nothing.
#
# Of each stage some tests that run its kernels over ragged groups, tails and odd places: whole suites, whose references
# run on the CPU beside a tool, would take too long to be run often. What a tool cannot follow is left out for it, and why:
# - racecheck: arrivals by one lane for its warp (few rows in fp8), sums that blocks of a cluster put into each other's
#   shared memory; and what does not end in minutes: dense3's book (so PairSum), order and gather but for graphs and
#   what is illegal;
# - synccheck: a named barrier at which warps wait in two places of the program, which PTX allows (few rows, which
#   PairSum's products are compared with).
set -uo pipefail

[[ $# -ge 1 && -d $1 && ${2:-memcheck} =~ ^(mem|race|init|sync)check$ ]] || { echo 'sanitize.sh FOLDER [memcheck|racecheck|initcheck|synccheck]' >&2 && exit 2; }
folder=$1 tool=${2:-memcheck}
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
[[ -x $sanitizer ]] || { echo 'compute-sanitizer is not here: it comes with the CUDA toolkit' >&2 && exit 2; }

# room|filter|the tools that it is for
cases='
gemm|HopperGemm.EveryEpilogue:HopperGemm.GatheredRows:HopperGemm.F16*|memcheck initcheck
gemm|PairSum.*|memcheck initcheck
gemm|PackedGemm.EveryEpilogue:PackedGemm.F16Saturates:PackedGemm.ScalesOfEveryKind|memcheck
gemm|Fp8Gemm.EveryEpilogue:Fp8Gemm.F16Saturates|memcheck
gemm|WalkPlans.*:GroupedGemmOnGpu.*:IndexedGemmOnGpu.*:OrderedGemm.*|memcheck
layer|GivenIds.*:SharedExpertBeside.*:LayerInF16.*|memcheck
layer|OneRowAToken.*:FoldedShared.*|memcheck
route|Router.*:RoutePolicy.*:RouteManyRows.*|memcheck
order|OrderGpu.*:GatherOnGpu.*|memcheck
order|OrderGpu.ZeroesAnyBytes:OrderGpu.Graph*:OrderGpu.Illegal*:GatherOnGpu.Graph*:GatherOnGpu.Illegal*|racecheck synccheck
combine|CombineOnGpu.*|memcheck synccheck
activate|*ActivateOn*|memcheck racecheck synccheck
shuffle|Shuffle*:ScatterAddOnGpu.*|memcheck racecheck synccheck
route_and_order|RouteAndOrder.*|memcheck
'
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export SHUNT_TEST_DEVICE=cuda
count=0
while IFS='|' read -r room filter tools; do
  [[ " $tools " == *" $tool "* ]] || continue
  count=$((count + 1))
  {
    "$sanitizer" --tool "$tool" --error-exitcode 99 --print-limit 5 "$folder/test_$room" --gtest_brief=1 --gtest_filter="$filter" >"$work/$count.log" 2>&1
    echo $? >"$work/$count.code"
  } &
  printf '%s %s\n' "$room" "$filter" >"$work/$count.name"
done <<<"$cases"
wait
clean=0
for ((i = 1; i <= count; ++i)); do
  code=$(cat "$work/$i.code") passed=$(sed -nE 's/^\[  PASSED  \] ([0-9]+) tests?\.$/\1/p' "$work/$i.log")
  if ((code == 0 && ${passed:-0} > 0)); then # not where all were skipped
    clean=$((clean + 1))
  else
    tail -n 40 "$work/$i.log"
  fi
  printf '%s: %s, %s tests passed, exit code %s\n' "$tool" "$(cat "$work/$i.name")" "${passed:-0}" "$code"
done
printf '%s: %d of %d found nothing\n' "$tool" "$clean" "$count"
((count > 0 && clean == count))
