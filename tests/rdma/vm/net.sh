#!/bin/bash
# guest-net loss PERCENT | delay MS | partition | heal : what leaves this guest's network device.
# A partition is silent: everything is dropped, the device stays up (run it on one guest or both).
set -e
case "$1" in
  loss) tc qdisc replace dev "$GUEST_NETDEV" root netem loss "$2%" ;;
  delay) tc qdisc replace dev "$GUEST_NETDEV" root netem delay "$2ms" ;;
  partition) tc qdisc replace dev "$GUEST_NETDEV" root netem loss 100% ;;
  heal) tc qdisc del dev "$GUEST_NETDEV" root ;;
  *) echo "guest-net: unknown '$1'; allowed: loss PERCENT, delay MS, partition, heal" >&2; exit 2 ;;
esac
