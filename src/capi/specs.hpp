// The specs of the C ABI, read into those of C++.
#pragma once

#include "capi/call.hpp"

namespace shunt::capi {

RouteSpec to_spec(const Call& call, const shunt_route_spec* spec);
OrderSpec to_spec(const Call& call, const shunt_order_spec* spec);
GatherSpec to_spec(const Call& call, const shunt_gather_spec* spec);
QuantiseSpec to_spec(const Call& call, const shunt_quantise_spec* spec);
GroupedGemmSpec to_spec(const Call& call, const shunt_grouped_gemm_spec* spec);
ActivationSpec to_spec(const Call& call, const shunt_activation_spec* spec);
CombineSpec to_spec(const Call& call, const shunt_combine_spec* spec);
ShuffleSpec to_spec(const Call& call, const shunt_shuffle_spec* spec);
ScatterAddSpec to_spec(const Call& call, const shunt_scatter_add_spec* spec);
// `name`: of the argument, in messages.
// A text that a struct has itself.
std::string to_text(const Call& call, const std::string& name, const char (&text)[32]);
// NULL and "": plain.
FormatSpec to_format(const char* text);
PackedMatrix to_packed(const Call& call, const std::string& name, const shunt_packed_matrix& given);
RowFormat to_rows(const Call& call, const char* name, std::int32_t value);
// NULL: the defaults.
LayerOptions to_options(const Call& call, const shunt_layer_options* options);

}  // namespace shunt::capi
