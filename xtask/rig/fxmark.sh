# fxmark.sh MIB OPTIONS...: inside the guest, `sheaf bench fxmark OPTIONS` on a null_blk device of MIB MiB
# that keeps its content in memory. The report comes between two lines that begin with REPORT.
set -e
mib=$1
shift
for module in f2fs ext4 xfs; do modprobe -q $module || true; done
modprobe null_blk nr_devices=0
mount -t configfs none /sys/kernel/config 2>/dev/null || true
config=/sys/kernel/config/nullb/nullb0
mkdir $config
echo "$mib" >$config/size
echo 1 >$config/memory_backed
echo 1 >$config/power
# The first write to a block takes memory for it: that is to be nobody's cost.
dd if=/dev/zero of=/dev/nullb0 bs=1M count="$mib" oflag=direct 2>/dev/null
if ./sheaf bench fxmark --device /dev/nullb0 --json "$@" >report.json 2>messages; then
  echo REPORT-BEGIN
  cat report.json
  echo REPORT-END
else
  status=$?
  tail -n 20 messages
  exit $status
fi
