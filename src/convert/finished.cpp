#include "convert/finished.hpp"

#include "core/check.hpp"

namespace shunt {

namespace {

using Json = nlohmann::ordered_json;

Json row_of(const FinishedMatrix& matrix) {
  return {matrix.layer,
          matrix.expert,
          static_cast<int>(matrix.which),
          matrix.error.difference,
          matrix.error.magnitude,
          matrix.tokens,
          matrix.fell_back};
}

bool is_row(const Json& row) {
  return row.is_array() && row.size() == 7 && row[0].is_number_integer() &&
         row[1].is_number_integer() && row[2].is_number_integer() && row[3].is_number() &&
         row[4].is_number() && row[5].is_number_integer() && row[6].is_boolean();
}

}  // namespace

void finish(PartialFolder& folder, const SourceFile& file,
            const std::vector<FinishedMatrix>& matrices) {
  Json rows = Json::array();
  for (const FinishedMatrix& matrix : matrices) rows.push_back(row_of(matrix));
  folder.finish(file.name, {{"experts", rows}});
}

std::vector<FinishedMatrix> finished_matrices(const PartialFolder& folder, const SourceFile& file,
                                              const Json& finished) {
  const auto wrong = [&](const std::string& what) {
    fail(Status::bad_file, "{}: finished['{}'].experts {}: remove {} to begin anew",
         folder.file(journal_name), file.name, what, folder.path());
  };
  const auto rows = finished.find("experts");
  if (rows == finished.end() || !rows->is_array()) wrong("is no list");
  std::vector<FinishedMatrix> matrices;
  for (const Json& row : *rows) {
    if (!is_row(row) || matrices.size() >= file.matrices.size()) {
      wrong(fmt::format("holds {}", row.dump()));
    }
    const SourceMatrix& of = file.matrices[matrices.size()];
    if (row[0] != of.layer || row[1] != of.expert || row[2] != static_cast<int>(of.which)) {
      wrong(
          fmt::format("holds {}, must hold layer {}, expert {}", row.dump(), of.layer, of.expert));
    }
    matrices.push_back({.layer = of.layer,
                        .expert = of.expert,
                        .which = of.which,
                        .error = {row[3].get<double>(), row[4].get<double>()},
                        .tokens = row[5].get<std::int64_t>(),
                        .fell_back = row[6].get<bool>()});
  }
  if (matrices.size() < file.matrices.size()) wrong("are too few");
  return matrices;
}

}  // namespace shunt
