// A build without the headers of libibverbs: no_verbs.cpp is linked here in place of
// system_verbs.cpp, whether this build has them or not.
#include <gtest/gtest.h>

#include "transport/link.h"
#include "transport/rdma/rdma_scheme.h"

namespace kvcore::transport {
namespace {

TEST(NoVerbs, RdmaIsRefusedWithTheReasonAndTheRestWorks) {
  const Status missing = rdma::available();
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(missing.error().message.find("libibverbs-dev"), std::string::npos);
  auto transport = make_transport();
  ASSERT_TRUE(transport.ok());
  EXPECT_EQ((*transport)->listen("rdma:127.0.0.1:0").error().code, ErrorCode::kUnsupported);
  EXPECT_EQ((*transport)->connect("rdma:127.0.0.1:7").error().code, ErrorCode::kUnsupported);
  EXPECT_TRUE((*transport)->listen("tcp:127.0.0.1:0").ok());
}

}  // namespace
}  // namespace kvcore::transport
