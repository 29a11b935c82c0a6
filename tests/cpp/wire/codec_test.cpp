// The codec is total: every message survives, every other input is refused, nothing crashes.
#include "wire/codec.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

namespace kvcore::wire {
namespace {

std::string random_string(std::mt19937_64& rng, std::size_t n, bool ascii) {
  std::string s(n, 'x');
  for (char& c : s) c = static_cast<char>(ascii ? 'a' + rng() % 26 : rng() % 256);
  return s;
}

template <class T>
std::vector<T> random_list(std::mt19937_64& rng) {
  std::vector<T> list(rng() % 20);
  for (T& v : list) v = static_cast<T>(rng());
  return list;
}

Value random_value(std::mt19937_64& rng, const FieldSpec& field) {
  switch (field.kind) {
    case FieldKind::kU64:
      return std::uint64_t{rng()};
    case FieldKind::kI64:
      return static_cast<std::int64_t>(rng());
    case FieldKind::kF64:
      return static_cast<double>(rng()) / 3.0;
    case FieldKind::kStr:
      return random_string(rng, rng() % 50, true);
    case FieldKind::kBytes:
      return random_string(rng, rng() % 50, false);
    case FieldKind::kId:
      return random_string(rng, 16, false);
    case FieldKind::kListI32:
      return random_list<std::int32_t>(rng);
    case FieldKind::kListU64:
      return random_list<std::uint64_t>(rng);
    case FieldKind::kListF64:
      return random_list<double>(rng);
    case FieldKind::kListBytes:
    case FieldKind::kListStr: {
      std::vector<std::string> list(rng() % 5);
      for (auto& s : list) s = random_string(rng, rng() % 9, field.kind == FieldKind::kListStr);
      return list;
    }
  }
  return std::uint64_t{0};
}

Message random_message(std::mt19937_64& rng, const MessageSpec& spec) {
  Message message{&spec, {}};
  for (const FieldSpec& field : spec.fields)
    message.values.push_back(field.required || rng() % 2 ? random_value(rng, field)
                                                         : default_value(field));
  return message;
}

TEST(WireSchema, NumbersNamesAndTagsAreUnique) {
  for (const MessageSpec& spec : all_messages()) {
    EXPECT_EQ(find_message(spec.type), &spec);
    EXPECT_EQ(find_message(spec.name), &spec);
    std::uint8_t last = 0;
    for (const FieldSpec& field : spec.fields) {
      EXPECT_GT(field.tag, last) << spec.name << "." << field.name;
      last = field.tag;
      EXPECT_EQ(&spec.fields[find_field(spec, field.name).value()], &field);
    }
  }
}

TEST(WireCodec, EveryMessageSurvives) {
  std::mt19937_64 rng(1);
  for (int round = 0; round < 50; ++round) {
    for (const MessageSpec& spec : all_messages()) {
      const Message message = random_message(rng, spec);
      const auto body = encode_body(message);
      ASSERT_TRUE(body.ok()) << body.error().message;
      const auto back = decode_body(*body);
      ASSERT_TRUE(back.ok()) << back.error().message;
      EXPECT_EQ(back->spec, &spec);
      EXPECT_EQ(back->values, message.values);
    }
  }
}

TEST(WireCodec, EveryPrefixAndEveryExtensionIsCorrupt) {
  std::mt19937_64 rng(2);
  for (const MessageSpec& spec : all_messages()) {
    Message message{&spec, {}};
    for (const FieldSpec& field : spec.fields) message.values.push_back(random_value(rng, field));
    auto body = *encode_body(message);
    // A prefix that ends between fields is valid when the rest is optional; then it must differ.
    for (std::size_t n = 0; n < body.size(); ++n) {
      const auto cut = decode_body(Bytes(body).first(n));
      if (cut.ok())
        EXPECT_EQ(encode_body(*cut)->size(), n);
      else
        EXPECT_EQ(cut.error().code, ErrorCode::kCorrupt);
    }
    body.push_back(std::byte{0});
    EXPECT_EQ(decode_body(body).error().code, ErrorCode::kCorrupt) << spec.name;
  }
}

TEST(WireCodec, MissingRequiredFieldIsNamed) {
  const MessageSpec* spec = find_message("cancel");
  const std::byte body[2] = {static_cast<std::byte>(spec->type), std::byte{0}};
  const auto result = decode_body(body);
  ASSERT_FALSE(result.ok());
  EXPECT_NE(result.error().message.find("'cancel'"), std::string::npos);
  EXPECT_NE(result.error().message.find("'request_id'"), std::string::npos);
}

TEST(WireCodec, HugeLengthsDoNotAllocateOrOverflow) {
  const MessageSpec* spec = find_message("prefix_events");
  std::vector<std::byte> body = {static_cast<std::byte>(spec->type),
                                 std::byte{0},
                                 std::byte{1},
                                 std::byte{1},
                                 std::byte{0xff},
                                 std::byte{0xff},
                                 std::byte{0xff},
                                 std::byte{0xff}};
  EXPECT_EQ(decode_body(body).error().code, ErrorCode::kCorrupt);
}

TEST(WireCodec, RandomAndMutatedBytesNeverCrashAndAreCanonicalWhenAccepted) {
  std::mt19937_64 rng(3);
  int accepted = 0;
  for (int round = 0; round < 40000; ++round) {
    std::vector<std::byte> body;
    if (round % 2 == 0) {
      body.resize(rng() % 80);
      for (auto& b : body) b = static_cast<std::byte>(rng());
      if (body.size() >= 2) {
        body[0] = static_cast<std::byte>(rng() % 22);
        body[1] = std::byte{0};
      }
    } else {
      const auto specs = all_messages();
      body = *encode_body(random_message(rng, specs[rng() % specs.size()]));
      for (std::uint64_t k = 1 + rng() % 3; k > 0; --k)
        body[rng() % body.size()] = static_cast<std::byte>(rng());
    }
    const auto message = decode_body(body);
    if (!message) {
      EXPECT_EQ(message.error().code, ErrorCode::kCorrupt);
      continue;
    }
    ++accepted;
    const auto again = encode_body(*message);
    ASSERT_TRUE(again.ok()) << again.error().message;
    EXPECT_LE(again->size(), body.size());
  }
  EXPECT_GT(accepted, 100);  // the mutations must also reach the inside of the decoder
}

TEST(WireCodec, Utf8) {
  for (const char* good :
       {"", "abc", "\xc3\xa4", "\xe2\x82\xac", "\xf0\x9f\x98\x80", "\xf4\x8f\xbf\xbf"})
    EXPECT_TRUE(is_utf8(good)) << good;
  for (const char* bad : {"\x80", "\xc0\x80", "\xc3", "\xe0\x80\x80", "\xed\xa0\x80",
                          "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xe2\x82", "a\xff"})
    EXPECT_FALSE(is_utf8(bad)) << bad;
}

}  // namespace
}  // namespace kvcore::wire
