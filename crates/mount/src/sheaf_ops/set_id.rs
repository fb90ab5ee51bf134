//! Whose changes take set-user-ID, set-group-ID and file capabilities away.

use super::{SheafOps, caller, errno, ino};
use crate::ops::{Context, NodeId, Result, SetAttributes};
use crate::process;
use fs::{Attr, Caller, Ino, OpenFile};

/// Whether somebody is in a group. Of supplementary groups requests say nothing.
fn is_in_group(context: &Context, group: u32) -> bool {
    context.gid == group || process::is_in_group(context.pid, group)
}

impl SheafOps {
    /// Takes set-id bits away before somebody changes a content who `may_not_keep_them`. The kernel
    /// says who that is for writes and truncation; for the rest it is everybody but root.
    pub(super) fn content_changes(
        &self,
        context: &Context,
        file: &OpenFile,
        may_not_keep_them: bool,
    ) -> Result<()> {
        self.capabilities_go(file.ino())?;
        if !may_not_keep_them {
            return Ok(());
        }
        let lost = self
            .fs
            .lose_privileges(file.ino(), |group| is_in_group(context, group));
        lost.map_err(errno)
    }

    /// Takes file capabilities away before a content changes, whoever changes it, where the kernel cannot see that there are any. Else it does so itself.
    fn capabilities_go(&self, file: Ino) -> Result<()> {
        match self.no_xattr {
            true => self.fs.lose_capabilities(file).map_err(errno),
            false => Ok(()),
        }
    }

    /// Somebody whose change of a file, which has these attributes, takes set-id bits away.
    pub(super) fn who_loses(context: &Context, attr: &Attr) -> Caller {
        Caller {
            privileged: false,
            in_group: fs::needs_group(attr.mode) && is_in_group(context, attr.gid),
            ..caller(context, 0)
        }
    }

    /// Who changes attributes, as far as set-id bits go, and whether they go.
    ///
    /// The kernel asks for no change at all where chown(2) is given neither owner nor group, which takes set-id bits and capabilities away and changes ctime,
    /// as every chown; and before a content changes by somebody who may not keep these bits. The former only the owner and root may do, and whether it is the former
    /// nobody says: of others it changes nothing, and their change of content takes the bits away itself. So root's write to a file
    /// that has capabilities, which is the one write of root's that the kernel asks for this before, takes set-id bits as well.
    pub(super) fn who_sets(
        &self,
        context: &Context,
        node: NodeId,
        changes: &SetAttributes,
        set: fs::SetAttr,
    ) -> Result<(Caller, fs::SetAttr)> {
        let cuts = changes.size.is_some();
        if cuts {
            self.capabilities_go(ino(node))?;
        }
        let is_nothing = !cuts && set == fs::SetAttr::default();
        let is_given = set.uid.is_some() || set.gid.is_some();
        if set.mode.is_some() || !(is_nothing || is_given || set.kill_suidgid) {
            return Ok((caller(context, 0), set));
        }
        let attr = self.fs.getattr(ino(node)).map_err(errno)?;
        let is_root = context.uid == 0;
        let takes = is_nothing && (is_root || context.uid == attr.uid);
        let set = fs::SetAttr {
            kill_suidgid: set.kill_suidgid || takes,
            ..set
        };
        // With a change of owner the kernel wants the bits taken of root as well, who keeps what others lose for their group's sake.
        let who = match is_root && !cuts {
            true => caller(context, 0),
            false => Self::who_loses(context, &attr),
        };
        Ok((who, set))
    }
}
