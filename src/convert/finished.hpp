// What a conversion's journal keeps of a finished file: a row for each matrix in it.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "convert/journal.hpp"
#include "convert/source.hpp"

namespace shunt {

struct FinishedMatrix {
  int layer = 0, expert = 0;
  ExpertMatrix which{};
  WeightError error{};
  std::int64_t tokens = -1;  // as ConvertedExpert
  bool fell_back = false;
};

// Says in the folder's journal that the file is finished.
void finish(PartialFolder& folder, const SourceFile& file,
            const std::vector<FinishedMatrix>& matrices);
// What finish() said, `finished` by the journal: of file.matrices, in their order. Throws
// Error{bad_file} where it is anything else, since then the journal was changed.
std::vector<FinishedMatrix> finished_matrices(const PartialFolder& folder, const SourceFile& file,
                                              const nlohmann::ordered_json& finished);

}  // namespace shunt
