# Second half of a guest's start: network, the rxe device, then the command; its exit code goes to
# the share. $GUEST is the number of this guest, its address is 10.77.0.(GUEST + 1), eth0 or dum0.
export PATH=/guest:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root LANG=C.UTF-8
B=/guest/busybox
ip() { /usr/bin/env ip "$@"; }  # busybox prefers its own small one
$B mount -t 9p -o trans=virtio,version=9p2000.L,rw,cache=none,msize=524288 share /share \
  || { echo "GUEST_FAILED: no 9p share"; $B poweroff -f; }
mkdir -p /lib/modules; ln -sfn /guest/modules/$(uname -r) /lib/modules/$(uname -r)
for m in @LATE@; do $B modprobe $m || echo "GUEST_FAILED: module $m"; done
ulimit -l unlimited
export GUEST=$($B sed -n 's/.*kvcore_guest=\([0-9]*\).*/\1/p' /proc/cmdline)
export GUEST_ADDRESS=10.77.0.$((GUEST + 1))
ip link set lo up
if [ -e /sys/class/net/eth0 ]; then N=eth0; else ip link add dum0 type dummy; N=dum0; fi
export GUEST_NETDEV=$N
ip link set $N up mtu 4200
ip addr add $GUEST_ADDRESS/24 dev $N
ip addr add fd77::$((GUEST + 1))/64 dev $N nodad
for i in 0 1; do
  [ $i = 0 ] || [ "$N" = dum0 ] || continue
  D=$N; [ $i = 0 ] || { ip link add dum$i type dummy; D=dum$i; ip link set $D up mtu 4200; \
                        ip addr add 10.78.0.1/24 dev $D; }
  rdma link add rxe$i type rxe netdev $D || echo "GUEST_FAILED: rxe$i"
done
cd /share
$B cut -d' ' -f1 /proc/uptime > /share/.vm/began.$GUEST
setsid -c /bin/bash /share/.vm/command.$GUEST < /dev/null > /dev/hvc0 2>&1
echo $? > /share/.vm/code.$GUEST.new
mv /share/.vm/code.$GUEST.new /share/.vm/code.$GUEST
sync
$B poweroff -f
