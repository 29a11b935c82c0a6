// The verbs of this machine, in a build that has the headers of libibverbs.
#include "transport/rdma/system_nic.h"

namespace kvcore::transport::rdma {
namespace {

class SystemVerbs final : public Verbs {
 public:
  explicit SystemVerbs(const IbVerbs* table) : table_(table) {}
  Result<std::unique_ptr<Nic>> open(const NicRequest& request) override {
    return SystemNic::open(table_, request);
  }

 private:
  const IbVerbs* table_;
};

}  // namespace

Result<Verbs*> system_verbs() {
  KVCORE_ASSIGN_OR_RETURN(const IbVerbs* table, load_ibverbs());
  static SystemVerbs verbs(table);
  return &verbs;
}

}  // namespace kvcore::transport::rdma
