// kvcore._core.pages: PageSpec, Arena, Pool; python/kvcore/pages.py is the public face.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "bindings/doc.h"
#include "bindings/errors.h"
#include "pages/block_table.h"
#include "pages/page_class.h"
#include "pages/page_spec.h"
#include "pages/pool.h"
#include "pages/sequence.h"
#include "pages/slice_io.h"

namespace py = pybind11;

namespace kvcore::bindings {
namespace {

using pages::Arena;
using pages::PageClass;
using pages::PageSpec;
using pages::Pool;
using pages::ReadonlyMapping;
using PageList = std::vector<std::int32_t>;

constexpr Format kElements[] = {Format::kBf16, Format::kF16, Format::kF32};
constexpr Format kFormats[] = {Format::kBf16, Format::kF16, Format::kF32, Format::kInt8,
                               Format::kFp8,  Format::kK4,  Format::kV4,  Format::kV3};
constexpr LayoutId kLayouts[] = {LayoutId::kPacked, LayoutId::kCanonical};

using pages::name_of;
const char* name_of(LayoutId layout) {
  return layout == LayoutId::kPacked ? "packed" : "canonical";
}

template <class E, std::size_t N>
E parse(const char* field, const std::string& name, const E (&values)[N]) {
  std::string allowed;
  for (const E value : values) {
    const char* known = name_of(value);
    if (name == known) return value;
    allowed += allowed.empty() ? known : text(", ", known);
  }
  throw ErrorException{
      invalid_argument(text(field, "='", name, "' is unknown: allowed ", allowed))};
}

PageSpec make_spec(std::int32_t num_layers, std::int32_t num_kv_heads, std::int32_t head_dim_k,
                   std::optional<std::int32_t> head_dim_v, std::int32_t page_size,
                   std::int32_t extent_pages, const std::string& format, const std::string& layout,
                   std::int32_t align_bytes, bool latent) {
  return unwrap(
      PageSpec::make({num_layers, num_kv_heads, head_dim_k, head_dim_v.value_or(head_dim_k),
                      page_size, extent_pages, parse("format", format, kElements),
                      parse("layout", layout, kLayouts), align_bytes, latent}));
}

template <auto Member>
auto option(const PageSpec& spec) {
  return spec.options().*Member;
}

void bind_spec(py::module_& m) {
  using O = pages::PageSpecOptions;
  py::class_<PageSpec>(m, "PageSpec", doc("pages.PageSpec"))
      .def(py::init(&make_spec), py::arg("num_layers"), py::arg("num_kv_heads"),
           py::arg("head_dim_k"), py::arg("head_dim_v") = py::none(), py::arg("page_size") = 64,
           py::arg("extent_pages") = 0, py::arg("format") = "bf16", py::arg("layout") = "packed",
           py::arg("align_bytes") = kFrameAlignBytes, py::arg("latent") = false)
      .def_property_readonly("latent", &option<&O::latent>, doc("pages.PageSpec.latent"))
      .def_property_readonly("num_layers", &option<&O::num_layers>,
                             doc("pages.PageSpec.num_layers"))
      .def_property_readonly("num_kv_heads", &option<&O::num_kv_heads>,
                             doc("pages.PageSpec.num_kv_heads"))
      .def_property_readonly("head_dim_k", &option<&O::head_dim_k>,
                             doc("pages.PageSpec.head_dim_k"))
      .def_property_readonly("head_dim_v", &option<&O::head_dim_v>,
                             doc("pages.PageSpec.head_dim_v"))
      .def_property_readonly("page_size", &option<&O::page_size>, doc("pages.PageSpec.page_size"))
      .def_property_readonly("align_bytes", &option<&O::align_bytes>,
                             doc("pages.PageSpec.align_bytes"))
      .def_property_readonly("extent_pages", &option<&O::extent_pages>,
                             doc("pages.PageSpec.extent_pages"))
      .def_property_readonly(
          "format", [](const PageSpec& s) { return name_of(s.options().format); },
          doc("pages.PageSpec.format"))
      .def_property_readonly(
          "layout", [](const PageSpec& s) { return name_of(s.options().layout); },
          doc("pages.PageSpec.layout"))
      .def_property_readonly("slice_bytes", &PageSpec::slice_bytes,
                             doc("pages.PageSpec.slice_bytes"))
      .def_property_readonly("layer_stride_bytes", &PageSpec::layer_stride_bytes,
                             doc("pages.PageSpec.layer_stride_bytes"))
      .def_property_readonly("frame_bytes", &PageSpec::frame_bytes,
                             doc("pages.PageSpec.frame_bytes"))
      .def_property_readonly("page_bytes", &PageSpec::page_bytes, doc("pages.PageSpec.page_bytes"))
      .def("usable_prefix", &PageSpec::usable_prefix, py::arg("num_tokens"),
           doc("pages.PageSpec.usable_prefix"))
      .def("describe", &PageSpec::describe, doc("pages.PageSpec.describe"))
      .def("__repr__", [](const PageSpec& s) { return "PageSpec(" + s.describe() + ")"; })
      .def("__eq__",
           [](const PageSpec& a, const PageSpec& b) { return a.describe() == b.describe(); })
      .def("__hash__", [](const PageSpec& s) { return py::hash(py::str(s.describe())); });
}

using FormatNames = std::vector<std::vector<std::pair<std::string, std::string>>>;

PageClass make_class(const PageSpec& spec, const FormatNames& formats) {
  const auto heads = static_cast<std::size_t>(spec.options().num_kv_heads);
  std::vector<pages::HeadFormats> table;
  for (std::size_t layer = 0; layer < formats.size(); ++layer) {
    if (formats[layer].size() != heads)
      throw ErrorException{invalid_argument(text("formats[", layer, "] has ", formats[layer].size(),
                                                 " entries: allowed ", heads, " (KV heads)"))};
    for (const auto& [k, v] : formats[layer])
      table.push_back({parse("format", k, kFormats), parse("format", v, kFormats)});
  }
  return unwrap(PageClass::make(spec, table));
}

FormatNames class_formats(const PageClass& c) {
  const auto heads = static_cast<std::size_t>(c.spec().options().num_kv_heads);
  FormatNames out(c.formats().size() / heads);
  for (std::size_t i = 0; i < c.formats().size(); ++i)
    out[i / heads].emplace_back(pages::name_of(c.formats()[i].k), pages::name_of(c.formats()[i].v));
  return out;
}

void check_layer(const PageSpec& spec, std::int32_t layer) {
  const std::int32_t num_layers = spec.options().num_layers;
  if (layer < 0 || layer >= num_layers)
    throw ErrorException{
        invalid_argument(text("layer=", layer, " is out of range: allowed 0 to ", num_layers - 1))};
}

std::int64_t layer_bytes(const PageClass& c, std::int32_t layer) {
  check_layer(c.spec(), layer);
  return c.slice_bytes(layer);
}

// Per KV head the offsets of its K and its V block from the slice's start.
std::vector<std::pair<std::int64_t, std::int64_t>> block_offsets(const PageClass& c,
                                                                 std::int32_t layer) {
  check_layer(c.spec(), layer);
  const HeadBlock* heads = c.layers(1)[static_cast<std::size_t>(layer)].heads;
  std::vector<std::pair<std::int64_t, std::int64_t>> out;
  for (std::int32_t head = 0; head < c.spec().options().num_kv_heads; ++head)
    out.emplace_back(heads[head].k_offset_bytes, heads[head].v_offset_bytes);
  return out;
}

void bind_class(py::module_& m) {
  py::class_<PageClass>(m, "PageClass", doc("pages.PageClass"))
      .def(py::init(&make_class), py::arg("spec"), py::arg("formats"))
      .def_static("open", &PageClass::open, py::arg("spec"), doc("pages.PageClass.open"))
      .def_property_readonly("spec", &PageClass::spec, doc("pages.PageClass.spec"))
      .def_property_readonly("formats", &class_formats, doc("pages.PageClass.formats"))
      .def_property_readonly("is_open", &PageClass::is_open, doc("pages.PageClass.is_open"))
      .def_property_readonly("page_bytes", &PageClass::page_bytes,
                             doc("pages.PageClass.page_bytes"))
      .def("run_bytes", &PageClass::run_bytes, py::arg("num_pages"),
           doc("pages.PageClass.run_bytes"))
      .def("slice_bytes", &layer_bytes, py::arg("layer"), doc("pages.PageClass.slice_bytes"))
      .def("block_offsets", &block_offsets, py::arg("layer"), doc("pages.PageClass.block_offsets"))
      .def_property_readonly(
          "digest",
          [](const PageClass& c) {
            const Digest32 d = c.digest();
            return py::bytes(reinterpret_cast<const char*>(d.data()), d.size());
          },
          doc("pages.PageClass.digest"))
      .def("describe", &PageClass::describe, doc("pages.PageClass.describe"))
      .def("__eq__",
           [](const PageClass& a, const PageClass& b) { return a.describe() == b.describe(); })
      .def("__hash__", [](const PageClass& c) { return py::hash(py::str(c.describe())); });
}

void bind_arena(py::module_& m) {
  py::class_<ReadonlyMapping>(m, "ReadonlyMapping", doc("pages.ReadonlyMapping"))
      .def_property_readonly("bytes", &ReadonlyMapping::bytes, doc("pages.ReadonlyMapping.bytes"))
      .def_property_readonly(
          "address",
          [](const ReadonlyMapping& r) { return reinterpret_cast<std::uintptr_t>(r.data()); },
          doc("pages.ReadonlyMapping.address"));
  py::class_<Arena, std::shared_ptr<Arena>>(m, "Arena", doc("pages.Arena"))
      .def(py::init([](std::int64_t bytes, bool huge_pages) {
             py::gil_scoped_release release;
             return unwrap(Arena::make(bytes, huge_pages));
           }),
           py::arg("bytes"), py::arg("huge_pages") = true)
      .def_property_readonly("bytes", &Arena::bytes, doc("pages.Arena.bytes"))
      .def_property_readonly("huge_bytes", &Arena::huge_bytes, doc("pages.Arena.huge_bytes"))
      .def_property_readonly("fd", &Arena::fd, doc("pages.Arena.fd"))
      .def_property_readonly(
          "address", [](const Arena& a) { return reinterpret_cast<std::uintptr_t>(a.data()); },
          doc("pages.Arena.address"))
      .def(
          "reopen_readonly", [](const Arena& a) { return unwrap(a.reopen_readonly()); },
          doc("pages.Arena.reopen_readonly"))
      .def_static(
          "map_readonly",
          [](int fd, std::int64_t bytes) { return unwrap(ReadonlyMapping::make(fd, bytes)); },
          py::arg("fd"), py::arg("bytes"), doc("pages.Arena.map_readonly"));
}

// A canonical array of the page's format: uint16 bit patterns or float32, C order.
py::array slice_array(const PageSpec& spec, std::int32_t head_dim) {
  const auto& o = spec.options();
  const py::dtype dtype =
      o.format == Format::kF32 ? py::dtype::of<float>() : py::dtype::of<std::uint16_t>();
  return py::array(dtype, std::vector<py::ssize_t>{o.page_size, o.num_kv_heads, head_dim});
}

py::tuple read_slice(const Pool& pool, std::int32_t page, std::int32_t layer) {
  py::array k = slice_array(pool.spec(), pool.spec().options().head_dim_k);
  py::array v = slice_array(pool.spec(), pool.spec().options().head_dim_v);
  unwrap(pages::read_slice(
      pool, page, layer,
      {static_cast<std::byte*>(k.mutable_data()), static_cast<std::size_t>(k.nbytes())},
      {static_cast<std::byte*>(v.mutable_data()), static_cast<std::size_t>(v.nbytes())}));
  return py::make_tuple(k, v);
}

std::span<const std::byte> checked(const char* field, const py::array& given, const PageSpec& spec,
                                   std::int32_t head_dim) {
  const py::array want = slice_array(spec, head_dim);
  const bool f16 = spec.options().format == Format::kF16 && given.dtype().kind() == 'f' &&
                   given.itemsize() == 2;  // numpy.float16 has the same bits
  if (!f16 && !given.dtype().equal(want.dtype()))
    throw ErrorException{
        invalid_argument(text(field, " has dtype ", std::string(py::str(given.dtype())),
                              ": allowed ", std::string(py::str(want.dtype()))))};
  const auto shape = [](const py::array& a) { return std::string(py::repr(a.attr("shape"))); };
  if (shape(given) != shape(want))
    throw ErrorException{
        invalid_argument(text(field, " has shape ", shape(given), ": allowed ", shape(want)))};
  return {static_cast<const std::byte*>(given.data()), static_cast<std::size_t>(given.nbytes())};
}

void write_slice(Pool& pool, std::int32_t page, std::int32_t layer, const py::array& k,
                 const py::array& v) {
  const py::array k_rows = py::array::ensure(k, py::array::c_style);
  const py::array v_rows = py::array::ensure(v, py::array::c_style);
  const auto& o = pool.spec().options();
  unwrap(pages::write_slice(pool, page, layer, checked("k", k_rows, pool.spec(), o.head_dim_k),
                            checked("v", v_rows, pool.spec(), o.head_dim_v)));
}

std::uintptr_t slice_address(const Pool& pool, std::int32_t page, std::int32_t layer) {
  (void)unwrap(pool.place(page));  // a page of this pool
  check_layer(pool.spec(), layer);
  return reinterpret_cast<std::uintptr_t>(pool.slice(page, layer));
}

py::tuple stats_tuple(const Pool& pool) {
  const pages::PoolStats s = pool.stats();
  return py::make_tuple(s.num_frames, s.free_frames, s.num_pages, s.held_pages, s.io_pages,
                        s.sealed_pages, s.arena_bytes, s.arena_huge_bytes, s.free_bytes,
                        s.open_bytes, s.compressed_bytes);
}

void bind_pool(py::module_& m) {
  py::class_<Pool, std::shared_ptr<Pool>>(m, "Pool")
      .def(py::init([](const PageSpec& spec, std::int64_t num_frames, std::shared_ptr<Arena> arena,
                       bool huge_pages, std::int64_t page_ids) {
             py::gil_scoped_release release;
             return unwrap(Pool::make(spec, num_frames, std::move(arena), huge_pages, page_ids));
           }),
           py::arg("spec"), py::arg("num_frames"), py::arg("arena") = py::none(),
           py::arg("huge_pages") = true, py::arg("page_ids") = 0)
      .def(
          "alloc",
          [](Pool& p, std::int64_t n, std::int32_t run) { return unwrap(p.alloc(n, run)); },
          py::arg("num_pages"), py::arg("run_pages") = 0, doc("pages.Pool.alloc"))
      .def(
          "alloc_in_class",
          [](Pool& p, std::int64_t n, std::int32_t c) { return unwrap(p.alloc_in_class(n, c)); },
          py::arg("num_pages"), py::arg("class_number"), doc("pages.Pool.alloc_in_class"))
      .def(
          "free_pages", [](Pool& p, std::int32_t run) { return unwrap(p.free_pages(run)); },
          py::arg("run_pages") = 0, doc("pages.Pool.free_pages"))
      .def(
          "add_class", [](Pool& p, const PageClass& c) { return unwrap(p.add_class(c)); },
          py::arg("page_class"), doc("pages.Pool.add_class"))
      .def(
          "page_class", [](const Pool& p, std::int32_t n) { return unwrap(p.page_class(n)); },
          py::arg("class_number"), doc("pages.Pool.page_class"))
      .def("class_pages", &Pool::class_pages, doc("pages.Pool.class_pages"))
      .def(
          "class_of",
          [](const Pool& p, std::int32_t page) { return unwrap(p.place(page)).class_number; },
          py::arg("page"), doc("pages.Pool.class_of"))
      .def("slice_address", &slice_address, py::arg("page"), py::arg("layer"),
           doc("pages.Pool.slice_address"))
      .def(
          "incref", [](Pool& p, const PageList& l) { unwrap(p.incref(l)); }, py::arg("pages"),
          doc("pages.Pool.incref"))
      .def(
          "decref", [](Pool& p, const PageList& l) { unwrap(p.decref(l)); }, py::arg("pages"),
          doc("pages.Pool.decref"))
      .def(
          "io_acquire", [](Pool& p, const PageList& l) { unwrap(p.io_acquire(l)); },
          py::arg("pages"), doc("pages.Pool.io_acquire"))
      .def(
          "io_release", [](Pool& p, const PageList& l) { unwrap(p.io_release(l)); },
          py::arg("pages"), doc("pages.Pool.io_release"))
      .def(
          "seal", [](Pool& p, const PageList& l) { unwrap(p.seal(l)); }, py::arg("pages"),
          doc("pages.Pool.seal"))
      .def(
          "is_sealed", [](const Pool& p, std::int32_t page) { return unwrap(p.is_sealed(page)); },
          py::arg("page"), doc("pages.Pool.is_sealed"))
      .def(
          "generation", [](const Pool& p, std::int32_t page) { return unwrap(p.generation(page)); },
          py::arg("page"), doc("pages.Pool.generation"))
      .def(
          "refs",
          [](const Pool& p, std::int32_t page) {
            const pages::PageRefs r = unwrap(p.refs(page));
            return std::pair(r.owner, r.io);
          },
          py::arg("page"), doc("pages.Pool.refs"))
      .def("_stats", &stats_tuple)
      .def("set_faults", &Pool::set_faults, py::arg("faults"), doc("pages.Pool.set_faults"))
      .def("read_slice", &read_slice, py::arg("page"), py::arg("layer"),
           doc("pages.Pool.read_slice"))
      .def("write_slice", &write_slice, py::arg("page"), py::arg("layer"), py::arg("k"),
           py::arg("v"), doc("pages.Pool.write_slice"))
      .def_property_readonly("spec", &Pool::spec, doc("pages.Pool.spec"))
      .def_property_readonly("arena", &Pool::arena, doc("pages.Pool.arena"))
      .def_property_readonly("num_pages", &Pool::num_pages, doc("pages.Pool.num_pages"))
      .def_property_readonly(
          "view_address", [](const Pool& p) { return reinterpret_cast<std::uintptr_t>(&p.view()); },
          doc("pages.Pool.view_address"));
}

void bind_sequence(py::module_& m) {
  using pages::SequencePages;
  py::class_<SequencePages>(m, "SequencePages", doc("pages.SequencePages"))
      .def(py::init<std::shared_ptr<Pool>>(), py::arg("pool").none(false))
      .def(
          "adopt",
          [](SequencePages& s, const PageList& l, std::int64_t n) { unwrap(s.adopt(l, n)); },
          py::arg("prefix"), py::arg("num_tokens"), doc("pages.SequencePages.adopt"))
      .def(
          "grow", [](SequencePages& s, std::int64_t n) { unwrap(s.grow(n)); },
          py::arg("num_tokens"), doc("pages.SequencePages.grow"))
      .def(
          "truncate", [](SequencePages& s, std::int64_t n) { unwrap(s.truncate(n)); },
          py::arg("num_tokens"), doc("pages.SequencePages.truncate"))
      .def(
          "replace_prefix",
          [](SequencePages& s, const PageList& l) { unwrap(s.replace_prefix(l)); },
          py::arg("pages"), doc("pages.SequencePages.replace_prefix"))
      .def("release", &SequencePages::release, doc("pages.SequencePages.release"))
      .def_property_readonly("released", &SequencePages::released,
                             doc("pages.SequencePages.released"))
      .def_property_readonly("pages", &SequencePages::pages, doc("pages.SequencePages.pages"))
      .def_property_readonly("num_tokens", &SequencePages::num_tokens,
                             doc("pages.SequencePages.num_tokens"))
      .def_property_readonly("capacity_tokens", &SequencePages::capacity_tokens,
                             doc("pages.SequencePages.capacity_tokens"));
}

py::array_t<std::int32_t> block_table(const std::vector<PageList>& rows,
                                      std::optional<std::int64_t> max_pages) {
  std::int64_t width = 0;
  for (const PageList& row : rows) width = std::max(width, static_cast<std::int64_t>(row.size()));
  width = max_pages.value_or(width);
  if (width < 0)
    throw ErrorException{
        invalid_argument(text("max_pages=", width, " is out of range: allowed 0 and up"))};
  py::array_t<std::int32_t> table(
      {static_cast<py::ssize_t>(rows.size()), static_cast<py::ssize_t>(width)});
  unwrap(pages::fill_block_table(rows, width,
                                 {table.mutable_data(), static_cast<std::size_t>(table.size())}));
  return table;
}

py::array_t<std::int64_t> slot_mapping(const PageList& pages, std::int64_t page_size,
                                       std::int64_t first_token, std::int64_t num_tokens) {
  if (num_tokens < 0)
    throw ErrorException{
        invalid_argument(text("num_tokens=", num_tokens, " is out of range: allowed 0 and up"))};
  py::array_t<std::int64_t> slots(static_cast<py::ssize_t>(num_tokens));
  unwrap(pages::fill_slot_mapping(pages, page_size, first_token,
                                  {slots.mutable_data(), static_cast<std::size_t>(num_tokens)}));
  return slots;
}

}  // namespace

void bind_pages(py::module_ m) {
  bind_spec(m);
  bind_class(m);
  bind_arena(m);
  bind_pool(m);
  bind_sequence(m);
  m.def("usable_prefix", &pages::usable_prefix, py::arg("num_tokens"), py::arg("page_size"),
        doc("pages.usable_prefix"));
  m.def("block_table", &block_table, py::arg("rows"), py::arg("max_pages") = py::none(),
        doc("pages.block_table"));
  m.def("slot_mapping", &slot_mapping, py::arg("pages"), py::arg("page_size"),
        py::arg("first_token"), py::arg("num_tokens"), doc("pages.slot_mapping"));
}

}  // namespace kvcore::bindings
