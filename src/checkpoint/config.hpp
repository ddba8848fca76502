// Reading a config.json: numbers strictly, and nothing about experts left unread.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace shunt {

// A value that a field may have. Not the JSON library's: every family names some, and none should
// have to compile it.
using ConfigValue = std::variant<bool, std::int64_t, double, std::string>;

// One object of a config.json. A field that is null counts as absent; number_or(), integer_or() and
// flag_or() refuse it where absence means something, a number other than 0 and 1 (of integers, one
// above them), or true. Every throw is Error{bad_file} and names the file, the field, its value and
// what is legal.
//
// Readers take alternative names of one field: the first that is there is read, and others that are
// there too must hold the same.
class Config {
 public:
  using Names = std::vector<std::string_view>;

  // `where` begins every message: "config.json". The object must outlive this.
  Config(std::string where, const nlohmann::json& object);
  // Of a file's text, as parse_object() reads it.
  static Config parse(const std::string& where, std::string_view text);

  bool has(std::string_view name) const;
  bool is_null(std::string_view name) const;  // it is there, as null
  bool is_list(std::string_view name) const;
  std::string_view name_of(const Names& names) const;  // the one that is there, else the first
  std::int64_t integer(const Names& names, std::int64_t low, std::int64_t high);
  std::int64_t integer_or(const Names& names, std::int64_t absent, std::int64_t low,
                          std::int64_t high);
  // Of what follows from other fields where it is absent: none.
  std::optional<std::int64_t> integer_if(const Names& names, std::int64_t low, std::int64_t high);
  double number_or(const Names& names, double absent, double low, double high);
  bool flag_or(const Names& names, bool absent);
  std::string text_or(const Names& names, std::string_view absent);
  std::optional<std::vector<std::int64_t>> integers(const Names& names, std::int64_t low,
                                                    std::int64_t high);
  std::optional<std::vector<std::string>> texts(const Names& names);
  // A list of numbers in which null counts as `absent`.
  std::optional<std::vector<double>> numbers(const Names& names, double absent, double low,
                                             double high);
  // One number, or a list of one a layer.
  std::vector<std::int64_t> integer_per_layer(const Names& names, std::int64_t layers,
                                              std::int64_t low, std::int64_t high);
  const nlohmann::json* object(std::string_view name);
  // A list of objects; none where the field is absent. They are read from this one's memory.
  std::vector<Config> objects(std::string_view name);

  // A field that changes the mathematics and of which only these values are understood.
  void expect(std::string_view name, const std::vector<ConfigValue>& legal);
  void expect_false(const Names& names);
  // Whether element i of the list `name` is `value`.
  bool element_is(std::string_view name, std::size_t i, const ConfigValue& value);
  // Fields that change nothing at inference.
  void ignore(const Names& names);
  // Throws Error{unsupported} for a field that sounds like experts or routing and that nothing has
  // read: what it means is not known, and must not be guessed. So for such a field, or one that was
  // read, that per_layer_config gives a layer of its own.
  void finish(std::string_view family) const;

  const std::string& where() const { return where_; }
  [[noreturn]] void refuse(std::string_view name, std::string_view legal) const;

 private:
  Config(std::string where, std::shared_ptr<const nlohmann::json> object);
  void refuse_null(const Names& names, std::string_view legal) const;
  const nlohmann::json* find(const Names& names);
  std::string where_;
  std::shared_ptr<const nlohmann::json> json_;
  std::set<std::string, std::less<>> known_;
};

}  // namespace shunt
