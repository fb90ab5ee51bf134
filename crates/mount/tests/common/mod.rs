//! What tests under a real mount have in common.

use std::path::Path;
use std::sync::mpsc;

use mount::{Insist, Unmounter};

/// Whether this machine can mount; says so if not.
pub fn has_fuse() -> bool {
    let has = Path::new("/dev/fuse").exists();
    if !has {
        eprintln!("skipped: no /dev/fuse");
    }
    has
}

/// A mount that a thread serves.
pub struct Session {
    pub unmounter: Unmounter,
    pub ended: mpsc::Receiver<Result<(), mount::Error>>,
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
            Ok(unmounter) => Session { unmounter, ended },
            Err(_) => panic!("{:?}", ended.recv().unwrap()),
        }
    }

    /// Unmounts and waits until the session is over.
    ///
    /// A process that another test has just started has copies of our descriptors, those of files
    /// in the mount among them, until its exec has closed them, which may be after we went on.
    pub fn end(self) {
        for _ in 0..1_000_000 {
            match self.unmounter.unmount(Insist::No) {
                Err(mount::Error::Unmount { error, .. })
                    if error.kind() == std::io::ErrorKind::ResourceBusy =>
                {
                    base::thread::yield_now();
                }
                result => {
                    result.unwrap();
                    return self.ended.recv().unwrap().unwrap();
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
