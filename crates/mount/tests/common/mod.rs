//! What tests under a real mount have in common.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;

use mount::{Insist, Unmounter};

/// Whether this machine can mount; says so if not.
pub fn has_fuse() -> bool {
    let missing = base::missing_for_mounts();
    missing.into_iter().for_each(base::skip);
    missing.is_none()
}

/// A mount that a thread serves.
pub struct Session {
    pub unmounter: Unmounter,
    pub ended: mpsc::Receiver<Result<(), mount::Error>>,
    heir: Child,
}

/// Takes a mount away once its input ends, which it does with this process.
const INHERIT: &str =
    "trap '' INT TERM HUP; read -r _; umount -l \"$0\" || fusermount3 -u -z \"$0\"";

/// A process that outlives this one, however it is killed, and takes away what it leaves mounted.
fn heir(at: &Path) -> Child {
    let mut heir = Command::new("/bin/sh");
    heir.args(["-c", INHERIT]).arg(at).current_dir("/");
    heir.stdin(Stdio::piped());
    heir.stdout(Stdio::null()).stderr(Stdio::null());
    heir.process_group(0).spawn().unwrap()
}

impl Session {
    /// Runs `serve` on a thread until it has passed its unmounter on.
    pub fn start<S>(serve: S) -> Session
    where
        S: FnOnce(&dyn Fn(Unmounter)) -> Result<(), mount::Error> + Send + 'static,
    {
        let (tell, ready) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        base::thread::spawn("mount", move || {
            let result = serve(&|unmounter| tell.send(unmounter).unwrap());
            drop(tell);
            end.send(result).unwrap();
        })
        .unwrap();
        match ready.recv() {
            Ok(unmounter) => Session {
                heir: heir(unmounter.mountpoint()),
                unmounter,
                ended,
            },
            Err(_) => panic!("{:?}", ended.recv().unwrap()),
        }
    }

    /// Unmounts and waits until the session is over.
    ///
    /// A process that another test has just started has copies of our descriptors, those of files
    /// in the mount among them, until its exec has closed them, which may be after we went on.
    pub fn end(self) {
        self.result().unwrap();
    }

    /// The same, and tells how it went.
    pub fn result(mut self) -> Result<(), mount::Error> {
        // The next mount may be at the same place.
        self.heir.kill().unwrap();
        self.heir.wait().unwrap();
        for _ in 0..1_000_000 {
            match self.unmounter.unmount(Insist::No) {
                Err(mount::Error::Unmount { error, .. })
                    if error.kind() == std::io::ErrorKind::ResourceBusy =>
                {
                    base::thread::yield_now();
                }
                result => {
                    result.unwrap();
                    return self.ended.recv().unwrap();
                }
            }
        }
        panic!("the mount stays busy");
    }
}

pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut data = vec![0; len];
    base::rng::Rng::new(seed).fill(&mut data);
    data
}
