// OCP MXFP8: e4m3, of which 448 is the largest, with a power of two for 32 of k.
#include "format/grouped.hpp"

namespace shunt {
namespace {

struct Mxfp8 : E4m3Codes, MxScales<8> {};

}  // namespace

const FormatRules mxfp8_rules = {{Format::mxfp8},
                                 Grouped<Mxfp8>::tensors,
                                 nullptr,
                                 Grouped<Mxfp8>::encode,
                                 Grouped<Mxfp8>::decode};

}  // namespace shunt
