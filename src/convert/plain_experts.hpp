// Experts of a plain format, in the tensors and the layout of their source.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "convert/shard_writer.hpp"
#include "convert/source.hpp"

namespace shunt {

// Writes those of one file.
class PlainExperts {
 public:
  // dtype: f32 | bf16 | f16, the new file's. Both outlive this.
  PlainExperts(const Checkpoint& checkpoint, DType dtype, ShardWriter& writer)
      : checkpoint_(checkpoint), writer_(writer), dtype_(dtype) {}
  // All of the expert's matrices that the file has.
  void write(const ConvertedExpert& expert, const std::vector<SourceMatrix>& matrices);
  // What of the tensors written belongs to no expert (the padding of zero-compute ones) keeps its
  // values. Once, at the end.
  void write_gaps();

 private:
  const Checkpoint& checkpoint_;
  ShardWriter& writer_;
  DType dtype_;
  // Which elements of a tensor are written: [begin, end).
  std::map<std::string, std::map<std::int64_t, std::int64_t>> written_;
};

}  // namespace shunt
