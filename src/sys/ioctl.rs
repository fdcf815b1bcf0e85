//! `ioctl(2)` with a pointer to plain data, in one place.
//! The requests themselves are beside: this file knows how to ask, not what.

#![expect(
    unsafe_code,
    reason = "the drivers' ioctls have no wrapper in any library we use"
)]

use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;
use nix::libc;

/// Data that is valid whatever bits the kernel writes into it.
///
/// # Safety
/// `repr(C)`, integers and arrays of them only, laid out as the ioctl it is passed to expects.
pub(super) unsafe trait Plain {}

/// Calls `request` with `data`, which the kernel may read and write.
///
/// The request is passed as the kernel's ABI has it: the C libraries disagree about the type of the argument.
pub(super) fn ioctl<T: Plain>(fd: impl AsFd, request: u32, data: &mut T) -> Result<i32, Errno> {
    // SAFETY: the descriptor is open; `data` is exclusively borrowed, and `Plain` promises that it is the structure
    // that the kernel expects and that anything the kernel leaves in it is valid.
    let result = unsafe {
        libc::syscall(
            libc::SYS_ioctl,
            fd.as_fd().as_raw_fd(),
            libc::c_ulong::from(request),
            std::ptr::from_mut(data),
        )
    };
    // An ioctl's result is an int.
    Errno::result(result).map(|value| i32::try_from(value).unwrap_or(0))
}
