#include "gemm/cpu_engine.hpp"

#include <algorithm>
#include <cstring>

#include "activate/cpu_engine.hpp"
#include "cpu/convert.hpp"
#include "gemm/cpu_scratch.hpp"
#include "gemm/packed_panels.hpp"

namespace shunt::cpu_engine {
namespace {

// Of a panel, so much at a time: two of these (the next is being fetched) fit the L2 of every CPU
// with AVX-512.
constexpr std::int64_t stretch_bytes = 256 << 10;
// From so many register tiles on, it pays to widen a stretch of 16-bit weights once.
constexpr std::int64_t widen_tiles = 6;
// Below so many nanoseconds of work (64 operations or 16 bytes each), starting threads costs more
// than they save.
constexpr double threads_pay_ns = 4000;

std::int64_t element_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// What a thread knows of the block that it is at: one for all of the block's panels.
struct ThreadState : ThreadScratch {
  const Block* block = nullptr;
  std::size_t first = 0;  // its first task
  // Of packed weights: what of a product is the block's, where the group's panels begin, and
  // whether gate and up have orders of their own.
  PackedProduct product;
  float globals[4] = {};
  const char* panels = nullptr;
  bool apart = false;
};

std::int64_t rows_there(const GroupedProduct& product) {
  std::int64_t rows = 0;
  for (int g = 0; g < product.groups; ++g) {
    const GroupRows of = product.walk.of(g);
    rows += of.end - of.begin;
  }
  return rows;
}

// Everything a task needs, fixed before the threads start.
class Run {
 public:
  Run(const Pool& pool, const GroupedProduct& product, Workspace workspace)
      : p_(product),
        kernels_(gemm_kernels(pool.isa())),
        convert_(convert_kernels(pool.isa())),
        activate_(activate_kernels(pool.isa())),
        count_(rows_there(product)),
        plan_(plan_product(pool.isa(), product.layout, count_)),
        panels_(static_cast<std::size_t>(product.layout.panels())) {
    if (packed(p_.layout)) {
      const PackedPanels panels = packed_panels(p_.layout);
      group_bytes_ = panels.group_bytes();
      panel_bytes_ = panels.panel_bytes();
      packed_kernel_ =
          packed_kernel(packed_kernels(pool.isa(), plan_.dot), p_.layout.format.format);
      if (plan_.fixed > 0) {
        fixed_ = fixed_product(pool.isa(), panels, p_.layout.dtype);
      }
    } else {
      group_bytes_ = p_.layout.group_bytes();
      panel_bytes_ = p_.layout.panel_bytes();
    }
    choose_operands();
    scratch_ = carve(pool, plan_, p_.layout, p_.groups, count_,
                     converted_rows_ * copies_of(p_.layout), prepared(), workspace);
    list_blocks();
    const std::int64_t whole = static_cast<std::int64_t>(panels_) * blocks_;
    const int most_parts = p_.layout.paired ? 2 : 4;
    while (parts_ < most_parts && whole * parts_ < std::int64_t{8} * pool.threads()) parts_ *= 2;
    block_tasks_ = panels_ * static_cast<std::size_t>(parts_);
    const double operations = 2.0 * static_cast<double>(count_) * static_cast<double>(p_.layout.n) *
                              static_cast<double>(p_.layout.k);
    const auto bytes = static_cast<double>(blocks_ * group_bytes_);
    threaded_ = pool.threads() > 1 && operations / 64 + bytes / 16 > threads_pay_ns;
  }

  bool threaded() const { return threaded_; }
  std::size_t conversions() const { return static_cast<std::size_t>(converted_rows_); }
  std::size_t tasks() const { return static_cast<std::size_t>(blocks_) * block_tasks_; }

  // For a thread's tasks.
  ThreadState begin(int thread) const {
    ThreadState s{of_thread(thread)};
    if (plan_.tiles.from > 0) *s.tiles_of = -1;
    return s;
  }

  // One row of the input as the kernels take it.
  void convert(std::size_t row, int thread) const {
    const auto r = static_cast<std::int64_t>(row);
    if (!in_source_order_ && !there(r)) return;
    if (p_.layout.format.ordered || plan_.fixed > 0) return convert_apart(r, thread);
    const std::int64_t source = in_source_order_ ? r : source_row(r);
    auto* const to = static_cast<char*>(scratch_.operands) + r * operand_stride(plan_, p_.layout);
    const float scale = p_.row_scale != nullptr ? p_.row_scale[r] : 1.0F;
    convert_.row(source_data(source), static_cast<Form>(p_.rows.dtype), scale, to, plan_.operand,
                 static_cast<std::size_t>(p_.layout.k));
    // The partner of the last of an odd number.
    if (padded()) {
      std::memset(to + 2 * p_.layout.k, 0, 2);
    }
  }

  void task(std::size_t number, ThreadState& s) const {
    if (s.block == nullptr || number - s.first >= block_tasks_) enter(number / block_tasks_, s);
    const Block& block = *s.block;
    const auto within = static_cast<std::int64_t>(number - s.first);
    const std::int64_t panel = parts_ == 1 ? within : within / parts_;
    const int columns = static_cast<int>(panel_columns) / parts_;
    const int column = static_cast<int>(within - panel * parts_) * columns;
    const std::int64_t out_columns = columns / (p_.layout.paired ? 2 : 1);
    const std::int64_t first =
        panel * p_.layout.panel_out_columns() + column / (p_.layout.paired ? 2 : 1);
    const std::int64_t valid = std::min(out_columns, p_.layout.out_columns() - first);
    if (valid <= 0) return;

    start_sums(block, panel, s.sums);
    multiply(panel, column, columns, s);
    activate_.tile(p_.activation, s.sums + column, static_cast<std::size_t>(block.rows), s.out,
                   static_cast<Form>(p_.out.dtype), static_cast<std::size_t>(first),
                   static_cast<std::size_t>(valid));
  }

 private:
  // Weights of no k are no bytes, and may have no address.
  bool prepared() const { return p_.prepared != nullptr || p_.layout.k == 0; }
  // The dot product of plain weights takes pairs of k.
  bool padded() const { return plan_.dot && p_.layout.k % 2 != 0 && !packed(p_.layout); }

  ThreadScratch of_thread(int thread) const {
    Carver carver(
        Workspace{scratch_.threads + static_cast<std::size_t>(thread) * scratch_.thread_bytes,
                  scratch_.thread_bytes});
    return carve_thread(carver, plan_, p_.layout, prepared());
  }

  void enter(std::size_t number, ThreadState& s) const {
    const Block& block = scratch_.blocks[number];
    s.block = &block;
    s.first = number * block_tasks_;
    const std::int64_t stride = p_.out.strides[0] * element_bytes(p_.out.dtype);
    for (std::int64_t r = 0; r < block.rows; ++r) {
      s.rows[r] = operand(block.first + r);
      s.out[r] = p_.out.as<char>() + (block.first + r) * stride;
    }
    if (packed(p_.layout)) enter_packed(s);
  }
  void enter_packed(ThreadState& s) const {
    const PackedPanels panels = packed_panels(p_.layout);
    const char* const group = group_data(*s.block);
    PackedHeader header;
    std::memcpy(&header, group, sizeof header);
    for (int i = 0; i < 4; ++i) s.globals[i] = header.global[panels.paired ? i % 2 : 0];
    s.panels = group + panels.panels_at();
    s.apart = header.apart != 0;
    s.product = {.rows = s.rows,
                 .count = static_cast<std::size_t>(s.block->rows),
                 .k = static_cast<std::size_t>(panels.k),
                 .group = static_cast<std::size_t>(panels.group()),
                 .fetch_ahead = features().fetch_ahead,
                 .fetch_near = features().fetch_near,
                 .scale = packed_scale(panels.format.format, header.halves != 0),
                 .zeros = panels.format.zeros,
                 .sums = s.sums};
  }
  const char* group_data(const Block& block) const {
    return static_cast<const char*>(p_.prepared) + block.group * group_bytes_;
  }
  // The block whose first panel a thread takes behind this one's last; null: none.
  const Block* next_of(const Block& block) const {
    const Block* const next = &block + 1;
    return next < scratch_.blocks + blocks_ ? next : nullptr;
  }

  // Rows that are put in the order of their matrix's k (one copy, or gate's and up's where they
  // differ), or fixed, or both.
  void convert_apart(std::int64_t r, int thread) const {
    const ThreadScratch s = of_thread(thread);
    const float scale = p_.row_scale != nullptr ? p_.row_scale[r] : 1.0F;
    const std::int64_t source = in_source_order_ ? r : source_row(r);
    convert_.row(source_data(source), static_cast<Form>(p_.rows.dtype), scale, s.row, plan_.operand,
                 static_cast<std::size_t>(p_.layout.k));
    if (!p_.layout.format.ordered) return fix(s.row, r, 0);
    const PackedPanels panels = packed_panels(p_.layout);
    const char* const data =
        static_cast<const char*>(p_.prepared) + group_of(r) * panels.group_bytes();
    PackedHeader header;
    std::memcpy(&header, data, sizeof header);
    for (std::int64_t copy = 0; copy <= (header.apart != 0 ? 1 : 0); ++copy) {
      const std::int32_t* const order = panels.order_of(data, copy);
      if (plan_.fixed > 0) {
        reorder<float>(s.row, order, s.ordered);
        fix(s.ordered, r, copy);
      } else if (form_bytes(plan_.operand) == 2) {
        reorder<std::uint16_t>(s.row, order, operand_at(r, copy));
      } else {
        reorder<float>(s.row, order, operand_at(r, copy));
      }
    }
  }
  // `from` has room up to a whole step.
  void fix(float* from, std::int64_t r, std::int64_t copy) const {
    const auto k = static_cast<std::size_t>(p_.layout.k);
    std::fill(from + k, from + (k + fixed_step - 1) / fixed_step * fixed_step, 0.0F);
    void* const to = operand_at(r, copy);
    const bool fixed = fixed_.row(from, k, plan_.fixed, to);
    if (!fixed) std::memcpy(to, from, k * sizeof(float));
    scratch_.floats[r] = fixed ? 0 : 1;
  }
  template <class T>
  void reorder(const void* from, const std::int32_t* order, void* to) const {
    for (std::int64_t k = 0; k < p_.layout.k; ++k) {
      static_cast<T*>(to)[k] = static_cast<const T*>(from)[order[k]];
    }
  }
  void* operand_at(std::int64_t row, std::int64_t copy) const {
    return static_cast<char*>(scratch_.operands) +
           (copy * converted_rows_ + row) * operand_stride(plan_, p_.layout);
  }

  // Blocks of a group are as even as can be.
  void list_blocks() {
    for (std::int32_t g = 0; g < p_.groups; ++g) {
      const GroupRows rows = p_.walk.of(g);
      std::int64_t first = rows.begin;
      std::int64_t left = (rows.end - rows.begin + most_block_rows - 1) / most_block_rows;
      for (; left > 0; --left) {
        const std::int64_t take = (rows.end - first + left - 1) / left;
        scratch_.blocks[blocks_++] = {g, static_cast<std::int32_t>(take), first};
        first += take;
      }
    }
  }

  // Of a row that is there.
  std::int64_t group_of(std::int64_t row) const {
    const std::int32_t* const offsets = p_.walk.offsets;
    if (offsets == nullptr) return row / p_.walk.capacity;
    return std::upper_bound(offsets, offsets + p_.groups + 1, row) - offsets - 1;
  }
  bool there(std::int64_t row) const {
    if (p_.walk.counts == nullptr) return true;
    return row < p_.walk.of(static_cast<int>(row / p_.walk.capacity)).end;
  }

  // Rows are read where they are when they already stand as the kernels take them; else each is
  // converted once: the rows of the source, or the product's when those are fewer or scaled.
  void choose_operands() {
    // Up to the last that is there, or that there is room for.
    const std::int64_t rows = p_.walk.counts == nullptr ? count_ : p_.walk.rows;
    if (p_.layout.format.ordered) {
      converted_rows_ = rows;
      return;
    }
    const bool as_is =
        static_cast<Form>(p_.rows.dtype) == plan_.operand && !padded() && p_.row_scale == nullptr;
    if (as_is) return;
    in_source_order_ =
        p_.permutation != nullptr && p_.row_scale == nullptr && p_.rows.shape[0] <= rows;
    converted_rows_ = in_source_order_ ? p_.rows.shape[0] : rows;
  }

  std::int64_t source_row(std::int64_t row) const {
    return p_.permutation == nullptr ? row : p_.permutation[row] / p_.slots;
  }
  const char* source_data(std::int64_t row) const {
    return p_.rows.as<const char>() + row * p_.rows.strides[0] * element_bytes(p_.rows.dtype);
  }
  // Where a row of the product stands among those converted.
  std::int64_t converted(std::int64_t row) const {
    return in_source_order_ ? source_row(row) : row;
  }
  const void* operand(std::int64_t row) const {
    return converted_rows_ == 0 ? source_data(source_row(row)) : operand_at(converted(row), 0);
  }

  // Sums start from the bias.
  void start_sums(const Block& block, std::int64_t panel, float* sums) const {
    if (p_.bias == nullptr) {
      std::memset(sums, 0, static_cast<std::size_t>(block.rows * panel_columns) * sizeof(float));
      return;
    }
    const float* const bias = p_.bias + block.group * p_.layout.n;
    for (std::int64_t c = 0; c < panel_columns; ++c) {
      const std::int64_t row = p_.layout.row(panel, c);
      sums[c] = row < 0 ? 0.0F : bias[row];
    }
    for (std::int64_t r = 1; r < block.rows; ++r) {
      std::memcpy(sums + r * panel_columns, sums, panel_columns * sizeof(float));
    }
  }

  void multiply(std::int64_t panel, int column, int columns, const ThreadState& s) const {
    const PanelLayout& layout = p_.layout;
    if (packed(layout)) return multiply_packed(panel, column, columns, s);
    const Block& block = *s.block;
    const bool widen = plan_.widen && block.rows > widen_tiles * kernels_.tile_rows;
    const char* const data = prepared() ? group_data(block) + panel * panel_bytes_ : nullptr;
    const auto at_column = [&](const void* stretch, DType dtype) {
      const std::int64_t bytes = dtype == DType::f16 ? 2 : 4;
      return static_cast<const char*>(stretch) + column * bytes;
    };
    const auto rows = static_cast<std::size_t>(block.rows);
    const char* const beside = tiled(rows) ? tiles(s.rows, rows, block.first, s) : nullptr;
    for (std::int64_t k = 0; k < layout.k; k += plan_.stretch) {
      const std::int64_t depth = std::min(plan_.stretch, layout.k - k);
      // The dot product takes pairs; the partner of the last of an odd number is zero.
      const auto length = static_cast<std::size_t>(plan_.dot ? depth + depth % 2 : depth);
      Product product{.rows = s.rows,
                      .row_offset = static_cast<std::size_t>(k) * form_bytes(plan_.operand),
                      .count = rows,
                      .k = length,
                      .columns = columns,
                      .sums = s.sums + column};
      if (beside != nullptr) {
        product.tiles = beside + plan_.tiles.bytes(static_cast<std::size_t>(k), 0);
        product.tile_bytes = plan_.tiles.bytes(static_cast<std::size_t>(layout.k), 0);
      }
      const void* stretch = s.packed;
      if (prepared()) {
        stretch = data + layout.chunk_bytes(k);
        if (parts_ == 1) {
          // Panels of a block, and stretches of them, follow one another.
          const std::int64_t bytes = layout.chunk_bytes(depth);
          product.ahead = static_cast<const char*>(stretch) + bytes;
          if (product.ahead == group_data(block) + group_bytes_) {
            const Block* const next = next_of(block);
            product.ahead = next != nullptr ? group_data(*next) : nullptr;
          }
          product.ahead_bytes = static_cast<std::size_t>(std::min(bytes, panel_bytes_));
        }
      } else {
        const Tensor matrix = p_.matrices[block.group];
        write_panel(layout, matrix, {}, panel, k, depth, s.packed);
      }
      if (widen) {
        (layout.dtype == DType::f16 ? kernels_.widen_f16 : kernels_.widen_bf16)(stretch, length,
                                                                                s.wide);
        product.weights = at_column(s.wide, DType::f32);
        kernels_.f32(product);
        continue;
      }
      product.weights = at_column(stretch, layout.dtype);
      switch (layout.dtype) {
        case DType::f32:
          kernels_.f32(product);
          break;
        case DType::f16:
          kernels_.f16(product);
          break;
        default:
          (plan_.dot ? kernels_.bf16_dot : kernels_.bf16)(product);
      }
    }
  }

  void multiply_packed(std::int64_t panel, int column, int columns, const ThreadState& s) const {
    const Block& block = *s.block;
    PackedProduct product = s.product;
    product.panel = s.panels + panel * panel_bytes_;
    product.column = column;
    product.columns = columns;
    product.globals = s.globals;
    if (static_cast<std::size_t>(panel) + 1 == panels_ && parts_ == 1) fetch_next(s);
    if (!s.apart) return multiply_rows(block, product, 0, s);
    // Gate's columns take rows in gate's order, up's in up's.
    product.columns = column_block;
    for (int which = 0; which < 2; ++which) {
      for (std::int64_t r = 0; r < block.rows; ++r) {
        s.rows[r] = operand_at(block.first + r, which);
      }
      for (int c = column; c < column + columns; c += column_block) {
        if (c / column_block % 2 != which) continue;
        product.column = c;
        multiply_rows(block, product, which, s);
      }
    }
  }

  // What a kernel would have fetched, had the next block's first panel followed.
  void fetch_next(const ThreadState& s) const {
    const Block* const next = next_of(*s.block);
    if (next == nullptr) return;
    const char* const at = group_data(*next) + (s.panels - group_data(*s.block));
    const auto bytes = std::min(static_cast<std::size_t>(panel_bytes_), s.product.fetch_ahead);
    for (std::size_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + line);
  }

  // The product's rows, in the `which` of their orders: in stretches of those that were fixed and
  // of those that could not be.
  void multiply_rows(const Block& block, PackedProduct product, int which,
                     const ThreadScratch& s) const {
    if (plan_.fixed == 0) {
      if (tiled(product.count)) {
        product.tiles = tiles(product.rows, product.count, 2 * block.first + which, s);
      }
      return packed_kernel_(product);
    }
    const std::size_t group = product.group;
    const auto floats = [&](std::int64_t r) {
      return scratch_.floats[converted(block.first + r)] != 0;
    };
    for (std::int64_t r = 0, next = 0; r < block.rows; r = next) {
      for (next = r + 1; next < block.rows && floats(next) == floats(r);) ++next;
      product.count = static_cast<std::size_t>(next - r);
      product.group = floats(r) ? group : plan_.fixed;
      if (floats(r)) {
        packed_kernel_(product);
      } else if (tiled(product.count)) {
        product.tiles = tiles(product.rows, product.count, 2 * (block.first + r) + which, s);
        fixed_.tiles.multiply(product);
      } else {
        fixed_.multiply(product);
      }
      product.rows += product.count;
      product.sums += next * panel_columns - r * panel_columns;
    }
  }

  bool tiled(std::size_t rows) const { return plan_.tiles.from > 0 && rows >= plan_.tiles.from; }
  // Put beside each other once for the panels that a thread takes one after the other; `which`
  // names them.
  const char* tiles(const void* const* rows, std::size_t count, std::int64_t which,
                    const ThreadScratch& s) const {
    if (*s.tiles_of != which) {
      plan_.tiles.pack(rows, count, static_cast<std::size_t>(p_.layout.k), plan_.fixed, s.tiles);
      *s.tiles_of = which;
    }
    return static_cast<const char*>(s.tiles);
  }

  const GroupedProduct& p_;
  PackedKernel packed_kernel_ = nullptr;
  FixedProduct fixed_;
  const GemmKernels& kernels_;
  const ConvertKernels& convert_;
  const ActivateKernels& activate_;
  std::int64_t count_;
  ProductPlan plan_;
  Scratch scratch_;
  std::size_t panels_;
  std::int64_t group_bytes_ = 0, panel_bytes_ = 0;  // of prepared weights
  std::int64_t blocks_ = 0;
  int parts_ = 1;
  std::size_t block_tasks_ = 1;
  std::int64_t converted_rows_ = 0;
  bool in_source_order_ = false;
  bool threaded_ = false;
};

}  // namespace

const GemmKernels& gemm_kernels([[maybe_unused]] Isa isa) {
#if SHUNT_X86
  switch (isa) {
    case Isa::amx_bf16:
      return amx_bf16::gemm_kernels;
    case Isa::avx512_bf16:
      return avx512_bf16::gemm_kernels;
    case Isa::avx512:
      return avx512::gemm_kernels;
    case Isa::avx2:
      return avx2::gemm_kernels;
    case Isa::scalar:
      break;
  }
#endif
  return scalar::gemm_kernels;
}

ProductPlan plan_product(Isa isa, const PanelLayout& layout, std::int64_t rows) {
  const GemmKernels& kernels = gemm_kernels(isa);
  ProductPlan plan;
  plan.dot = layout.dtype == DType::bf16 && kernels.bf16_dot != nullptr;
  plan.operand = layout.dtype == DType::f32   ? Form::f32
                 : layout.dtype == DType::f16 ? Form::f32_of_f16
                 : plan.dot                   ? Form::bf16
                                              : Form::f32_of_bf16;
  plan.block_rows = std::min(most_block_rows, std::max<std::int64_t>(rows, 1));
  const auto use = [&](const RowTiles& tiles) {
    if (tiles.from > 0 && static_cast<std::size_t>(plan.block_rows) >= tiles.from) {
      plan.tiles = tiles;
    }
  };
  if (packed(layout)) {
    plan.stretch = std::max<std::int64_t>(layout.k, 1);
    const FixedProduct fixed = fixed_product(isa, packed_panels(layout), layout.dtype);
    plan.fixed = fixed.group;
    if (plan.dot && (plan.fixed > 0 || !packed_dots(isa, layout.format.format))) {
      plan.dot = false;  // rows become integers, or f32
      plan.operand = Form::f32_of_bf16;
    }
    use(plan.fixed > 0 ? fixed.tiles.rows : plan.dot ? packed_tiles(isa) : RowTiles{});
    return plan;
  }
  if (plan.dot) use(kernels.tiles);
  plan.widen =
      layout.dtype != DType::f32 && !plan.dot && plan.block_rows > widen_tiles * kernels.tile_rows;
  // What passes through the L2 is f32 when weights are widened.
  const std::int64_t line = plan.widen ? panel_columns * 4 : layout.chunk_bytes(2) / 2;
  const std::int64_t most = stretch_bytes / line;
  const std::int64_t stretches = std::max<std::int64_t>(1, (layout.k + most - 1) / most);
  const std::int64_t stretch = (layout.k + stretches - 1) / stretches;
  // Whatever the number of rows: tiles add up 32 of k at a time.
  const std::int64_t whole = plan.dot && kernels.tiles.from > 0 ? 32 : 2;
  plan.stretch = std::max<std::int64_t>(whole, (stretch + whole - 1) / whole * whole);
  return plan;
}

std::size_t product_workspace_bytes(const Pool& pool, const PanelLayout& layout, int groups,
                                    std::int64_t rows, std::int64_t source_rows, bool prepared) {
  const ProductPlan plan = plan_product(pool.isa(), layout, rows);
  const std::int64_t operands =
      layout.format.ordered ? rows * copies_of(layout) : std::min(rows, source_rows);
  return carve(pool, plan, layout, groups, rows, operands, prepared, {}).total;
}

void multiply_groups(Pool& pool, const GroupedProduct& product, Workspace workspace) {
  if (rows_there(product) == 0 || product.layout.out_columns() == 0) return;
  const Run run(pool, product, workspace);
  if (!run.threaded()) {
    for (std::size_t row = 0; row < run.conversions(); ++row) run.convert(row, 0);
    ThreadState state = run.begin(0);
    for (std::size_t task = 0; task < run.tasks(); ++task) run.task(task, state);
    return;
  }
  pool.run([&](Team& team) {
    if (run.conversions() > 0) {
      team.for_each(run.conversions(), [&](std::size_t row) { run.convert(row, team.index()); });
      team.barrier();
    }
    ThreadState state = run.begin(team.index());
    team.for_each(run.tasks(), [&](std::size_t task) { run.task(task, state); });
  });
}

}  // namespace shunt::cpu_engine
