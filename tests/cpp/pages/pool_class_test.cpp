#include <gtest/gtest.h>

#include "pages/pool.h"

namespace kvcore::pages {
namespace {

using Pages = std::vector<std::int32_t>;

PageSpec spec_of(std::int32_t extent) {
  PageSpecOptions o;
  o.num_layers = 4;
  o.num_kv_heads = 2;
  o.head_dim_k = o.head_dim_v = 64;
  o.extent_pages = extent;
  return PageSpec::make(o).value();
}

PageClass small_class(const PageSpec& spec, Format v = Format::kV3) {
  const std::vector<HeadFormats> table(8, {Format::kK4, v});
  return PageClass::make(spec, table).value();
}

std::shared_ptr<Pool> pool_of(std::int32_t extent, std::int64_t frames = 4) {
  return Pool::make(spec_of(extent), frames, nullptr, false, 5 * frames * extent).value();
}

void expect_empty(const Pool& pool) {
  const PoolStats s = pool.stats();
  EXPECT_EQ(s.free_frames, s.num_frames);
  EXPECT_EQ(s.open_bytes + s.compressed_bytes, 0);
  EXPECT_EQ(s.free_bytes, s.num_frames * pool.spec().frame_bytes());
}

TEST(PoolClasses, AClassIsFoundAgainAndOthersAreRefused) {
  const auto pool = pool_of(4);
  const PagesView* view = &pool->view();
  EXPECT_EQ(view->num_classes, 2);
  const PageClass v3 = small_class(pool->spec());
  EXPECT_EQ(pool->add_class(v3).value(), 1);
  EXPECT_EQ(pool->add_class(small_class(pool->spec(), Format::kV4)).value(), 2);
  EXPECT_EQ(pool->add_class(v3).value(), 1);
  EXPECT_EQ(view, &pool->view());
  EXPECT_EQ(view->num_classes, 4);
  EXPECT_EQ(view->classes[2].layers[1].run_bytes, v3.slice_bytes(0));
  EXPECT_FALSE(pool->add_class(PageClass::open(pool->spec())).ok());
  EXPECT_FALSE(pool->add_class(small_class(spec_of(2))).ok());
  EXPECT_EQ(pool->page_class(1).value().describe(), v3.describe());
  EXPECT_FALSE(pool->page_class(3).ok());
}

TEST(PoolClasses, SinglePagesComeFreeOneByOne) {
  const auto pool = pool_of(4);
  const Pages pages = pool->alloc(5, 1).value();
  EXPECT_EQ(pages.size(), 5u);
  const std::int64_t single = pool->stats().open_bytes / 5;
  EXPECT_EQ(pool->place(pages[1]).value().layer_stride_bytes, pool->spec().slice_bytes());
  EXPECT_EQ(pool->slice(pages[1], 2) - pool->slice(pages[1], 0), 2 * pool->spec().slice_bytes());
  ASSERT_TRUE(pool->decref(std::span(pages).first(2)).ok());
  EXPECT_EQ(pool->stats().open_bytes, 3 * single);
  EXPECT_EQ(pool->generation(pages[0]).value(), 2u);
  EXPECT_EQ(pool->generation(pages[2]).value(), 1u);
  const Pages frame = pool->alloc(1).value();
  EXPECT_EQ(pool->place(frame[0]).value().layer_stride_bytes, pool->spec().layer_stride_bytes());
  ASSERT_TRUE(pool->decref(std::span(pages).subspan(2)).ok());
  ASSERT_TRUE(pool->decref(frame).ok());
  expect_empty(*pool);
  EXPECT_EQ(pool->alloc(3, 2).error().code, ErrorCode::kInvalidArgument);
}

TEST(PoolClasses, ASealedPageHasOtherBytesAndTheSameId) {
  for (const std::int32_t extent : {1, 4}) {
    const auto pool = pool_of(extent);
    const std::int32_t number = pool->add_class(small_class(pool->spec())).value();
    const std::int64_t run = pool->page_class(number).value().run_bytes(1);
    const Pages pages = pool->alloc(2, 1).value();
    const std::int64_t open = pool->stats().open_bytes;
    const SealJob job = pool->begin_seal(pages[0], number).value();
    ASSERT_TRUE(pool->end_seal(job, true).ok());
    EXPECT_EQ(pool->place(pages[0]).value().class_number, number);
    EXPECT_EQ(pool->view().records[pages[0]].offset_bytes, job.offset_bytes);
    EXPECT_TRUE(pool->is_sealed(pages[0]).value());
    EXPECT_EQ(pool->stats().open_bytes, open / 2);
    EXPECT_EQ(pool->stats().compressed_bytes, run);
    EXPECT_EQ(pool->class_pages(), (std::vector<std::int64_t>{1, 1}));
    EXPECT_EQ(pool->begin_seal(pages[0], number).error().code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(pool->begin_seal(pages[1], 0).error().code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(pool->begin_seal(pages[1], number + 1).error().code, ErrorCode::kInvalidArgument);
    ASSERT_TRUE(pool->decref(pages).ok());
    EXPECT_EQ(pool->begin_seal(pages[1], number).error().code, ErrorCode::kInvalidArgument);
    expect_empty(*pool);
    EXPECT_FALSE(pool->is_sealed(pool->alloc(1, 1).value()[0]).value());
  }
}

TEST(PoolClasses, BytesThatATransferReadsStayUntilItEnds) {
  const auto pool = pool_of(4);
  const std::int32_t number = pool->add_class(small_class(pool->spec())).value();
  const Pages pages = pool->alloc(1, 1).value();
  const std::int64_t open = pool->stats().open_bytes;
  ASSERT_TRUE(pool->io_acquire(pages).ok());
  ASSERT_TRUE(pool->io_acquire(pages).ok());
  ASSERT_TRUE(pool->end_seal(pool->begin_seal(pages[0], number).value(), true).ok());
  ASSERT_TRUE(pool->io_release(pages).ok());
  EXPECT_EQ(pool->stats().open_bytes, open);
  ASSERT_TRUE(pool->decref(pages).ok());
  EXPECT_GT(pool->stats().compressed_bytes, 0);
  ASSERT_TRUE(pool->io_release(pages).ok());
  expect_empty(*pool);
}

TEST(PoolClasses, AFrameIsFreeWhenItsLastPageHasLeft) {
  const auto pool = pool_of(2);
  const std::int32_t number = pool->add_class(small_class(pool->spec())).value();
  const Pages pages = pool->alloc(2).value();
  ASSERT_TRUE(pool->end_seal(pool->begin_seal(pages[0], number).value(), true).ok());
  EXPECT_EQ(pool->stats().open_bytes, pool->spec().frame_bytes());
  ASSERT_TRUE(pool->end_seal(pool->begin_seal(pages[1], number).value(), true).ok());
  EXPECT_EQ(pool->stats().open_bytes, 0);
  const Pages other = pool->alloc(2).value();
  ASSERT_TRUE(pool->end_seal(pool->begin_seal(other[1], number).value(), true).ok());
  ASSERT_TRUE(pool->decref(other).ok());
  ASSERT_TRUE(pool->decref(pages).ok());
  expect_empty(*pool);
}

TEST(PoolClasses, AFailedSealChangesNothing) {
  const auto pool = pool_of(1, 1);
  const auto plan = std::make_shared<FaultPlan>(1);
  pool->set_faults(plan);
  const std::int32_t number = pool->add_class(small_class(pool->spec())).value();
  const Pages pages = pool->alloc(1).value();
  const PageRecord before = pool->view().records[pages[0]];
  EXPECT_EQ(pool->begin_seal(pages[0], number).error().code, ErrorCode::kOutOfPages);  // full
  ASSERT_TRUE(pool->decref(pages).ok());
  const auto larger = pool_of(1, 2);
  larger->set_faults(plan);
  ASSERT_TRUE(larger->add_class(small_class(larger->spec())).ok());
  const Pages held = larger->alloc(1).value();
  ASSERT_TRUE(plan->fail_nth("pool.seal", 1).ok());
  EXPECT_EQ(larger->begin_seal(held[0], number).error().code, ErrorCode::kOutOfPages);
  const SealJob job = larger->begin_seal(held[0], number).value();
  ASSERT_TRUE(larger->end_seal(job, false).ok());
  EXPECT_EQ(larger->view().records[held[0]].offset_bytes, before.offset_bytes);
  EXPECT_EQ(larger->refs(held[0]).value().owner, 1);
  EXPECT_EQ(larger->stats().compressed_bytes, 0);
  ASSERT_TRUE(larger->decref(held).ok());
  expect_empty(*larger);
}

TEST(PoolClasses, OwnersMayLeaveWhileAPageIsBeingSealed) {
  const auto pool = pool_of(2);
  const std::int32_t number = pool->add_class(small_class(pool->spec())).value();
  for (const bool done : {true, false}) {
    const Pages pages = pool->alloc(1, 1).value();
    const SealJob first = pool->begin_seal(pages[0], number).value();
    const SealJob second = pool->begin_seal(pages[0], number).value();
    ASSERT_TRUE(pool->decref(pages).ok());
    EXPECT_TRUE(pool->end_seal(first, done).ok());
    EXPECT_EQ(pool->end_seal(second, true).ok(), !done);
    expect_empty(*pool);
  }
}

TEST(PoolClasses, BytesHeldOnlyByACacheAreCounted) {
  const auto pool = pool_of(2);
  const std::int32_t number = pool->add_class(small_class(pool->spec())).value();
  const Pages frame = pool->alloc(2).value();
  const Pages singles = pool->alloc(2, 1).value();
  ASSERT_TRUE(pool->end_seal(pool->begin_seal(singles[0], number).value(), true).ok());
  std::vector<std::uint8_t> cached(static_cast<std::size_t>(pool->num_pages()), 0);
  const auto freeable = [&] { return pool->bytes_held_only_by(cached).value(); };
  const PoolStats s = pool->stats();
  EXPECT_EQ(freeable(), 0);
  for (const std::int32_t page : {frame[0], singles[0], singles[1]})
    cached[static_cast<std::size_t>(page)] = 1;
  EXPECT_EQ(freeable(), s.open_bytes + s.compressed_bytes - pool->spec().frame_bytes());
  cached[static_cast<std::size_t>(frame[1])] = 1;
  EXPECT_EQ(freeable(), s.open_bytes + s.compressed_bytes);
  ASSERT_TRUE(pool->io_acquire(std::span(singles).first(1)).ok());
  EXPECT_EQ(freeable(), s.open_bytes);
}

TEST(PoolInClass, PagesAreCompressedFromTheStartAndComeFreeOneByOne) {
  for (const std::int32_t extent : {1, 2}) {
    const auto pool = pool_of(extent);
    const PageClass small = small_class(pool->spec());
    const std::int32_t number = pool->add_class(small).value();
    const PoolStats before = pool->stats();
    EXPECT_FALSE(pool->alloc_in_class(1, 0).ok());
    EXPECT_FALSE(pool->alloc_in_class(-1, number).ok());
    const Pages pages = pool->alloc_in_class(3, number).value();
    EXPECT_EQ(pool->stats().compressed_bytes, 3 * small.run_bytes(1));
    EXPECT_EQ(pool->stats().open_bytes, 0);
    EXPECT_EQ(pool->class_pages()[static_cast<std::size_t>(number)], 3);
    for (const std::int32_t page : pages) {
      EXPECT_EQ(pool->place(page).value().class_number, number);
      EXPECT_FALSE(pool->is_sealed(page).value());
      EXPECT_EQ(pool->refs(page).value().owner, 1);
    }
    const std::uint64_t generation = pool->generation(pages[1]).value();
    ASSERT_TRUE(pool->io_acquire(std::span(pages).subspan(1, 1)).ok());
    ASSERT_TRUE(pool->decref(pages).ok());
    EXPECT_EQ(pool->stats().compressed_bytes, small.run_bytes(1));  // a transfer writes it
    ASSERT_TRUE(pool->io_release(std::span(pages).subspan(1, 1)).ok());
    EXPECT_EQ(pool->stats().free_bytes, before.free_bytes);
    EXPECT_EQ(pool->generation(pages[1]).value(), generation + 1);
    const auto all = pool->alloc_in_class(1 << 20, number);  // nothing, where not all fit
    ASSERT_FALSE(all.ok());
    EXPECT_EQ(all.error().code, ErrorCode::kOutOfPages);
    EXPECT_EQ(pool->stats().free_bytes, before.free_bytes);
    EXPECT_EQ(pool->alloc(4 * extent).value().size(), static_cast<std::size_t>(4 * extent));
  }
}

}  // namespace
}  // namespace kvcore::pages
