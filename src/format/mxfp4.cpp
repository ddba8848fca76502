// OCP MXFP4: e2m1, of which 6 is the largest, with a power of two for 32 of k.
#include "format/grouped.hpp"

namespace shunt {
namespace {

struct Mxfp4 : E2m1Codes, MxScales<2> {};

}  // namespace

const FormatRules mxfp4_rules = {{Format::mxfp4},
                                 Grouped<Mxfp4>::tensors,
                                 nullptr,
                                 Grouped<Mxfp4>::encode,
                                 Grouped<Mxfp4>::decode};

}  // namespace shunt
