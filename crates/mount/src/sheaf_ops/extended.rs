//! Extended attributes. With `noxattr` each of these requests is refused as unknown, whereupon the kernel sends no more of its kind while the mount lasts: an `ls -l`, which
//! asks for two of each file, and the first write to a file, before which the kernel looks for capabilities, do without them. What then is left to this side alone:
//! a change of content takes capabilities away ([`SheafOps::content_changes`]), for the kernel does not see them.

use super::{SheafOps, caller, errno, ino};
use crate::ops::{Context, Errno, NodeId, Result};

/// An attribute that every inode has, that nobody can set, and that is not listed, so that no copy takes it along:
/// its change cookie in decimal digits. What statx has for that does not leave the kernel.
const CHANGE_COOKIE: &[u8] = b"sheaf.change_cookie";

/// Attributes of these names are root's, and the kernel lets nobody else read or write them.
const TRUSTED: &[u8] = b"trusted.";

impl SheafOps {
    fn may_have_extended(&self) -> Result<()> {
        match self.no_xattr {
            true => Err(Errno(libc::ENOSYS)),
            false => Ok(()),
        }
    }

    pub(super) fn set_extended(
        &self,
        ctx: &Context,
        node: NodeId,
        (name, value): (&[u8], &[u8]),
        flags: u32,
        acl_kill_sgid: bool,
    ) -> Result<()> {
        self.may_have_extended()?;
        let kill = if acl_kill_sgid {
            fs::XATTR_ACL_KILL_SGID
        } else {
            0
        };
        let flags = (flags as i32 & (fs::XATTR_CREATE | fs::XATTR_REPLACE)) | kill;
        self.fs
            .setxattr(&caller(ctx, 0), ino(node), name, value, flags)
            .map_err(errno)?;
        self.attributes_changed(node);
        self.node_changed(node)
    }

    pub(super) fn get_extended(&self, node: NodeId, name: &[u8]) -> Result<Vec<u8>> {
        self.may_have_extended()?;
        if name == CHANGE_COOKIE {
            let cookie = self.fs.change_cookie(ino(node)).map_err(errno)?;
            return Ok(cookie.to_string().into_bytes());
        }
        self.fs.getxattr(ino(node), name).map_err(errno)
    }

    pub(super) fn list_extended(&self, context: &Context, node: NodeId) -> Result<Vec<u8>> {
        self.may_have_extended()?;
        let names = self.fs.listxattr(ino(node)).map_err(errno)?;
        if context.uid == 0 {
            return Ok(names);
        }
        let others = names.split_inclusive(|&byte| byte == 0);
        let others = others.filter(|name| !name.starts_with(TRUSTED));
        Ok(others.flatten().copied().collect())
    }

    pub(super) fn remove_extended(&self, ctx: &Context, node: NodeId, name: &[u8]) -> Result<()> {
        self.may_have_extended()?;
        self.fs
            .removexattr(&caller(ctx, 0), ino(node), name)
            .map_err(errno)?;
        self.attributes_changed(node);
        self.node_changed(node)
    }
}
