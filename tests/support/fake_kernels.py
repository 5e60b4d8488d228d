"""Small kernels as PTX, and a fake driver that is ready for them."""

from typing import Any

from c_launcher import begin
from fake_driver import FakeDriver
from ptx_source import KERNEL

# k(o, n): o[i] *= 2 for a block's threads i < n
DOUBLE = KERNEL.format(
    params=".param .u64 p0,\n.param .u32 p1",
    body="""ld.param.u64 %rd0, [p0];
ld.param.u32 %r0, [p1];
mov.u32 %r1, %tid.x;
setp.ge.u32 %p0, %r1, %r0;
@%p0 bra END;
mul.wide.u32 %rd1, %r1, 4;
add.s64 %rd0, %rd0, %rd1;
ld.global.u32 %r2, [%rd0];
add.s32 %r2, %r2, %r2;
st.global.u32 [%rd0], %r2;
END:""",
)

# k(o, a, b, c): o[i] = a + b + c, of a float, an unsigned and a double
ADD = KERNEL.format(
    params=".param .u64 p0,\n.param .f32 p1,\n.param .u32 p2,\n.param .f64 p3",
    body="""ld.param.u64 %rd0, [p0];
ld.param.f32 %f0, [p1];
ld.param.u32 %r0, [p2];
ld.param.f64 %fd0, [p3];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd1, %r1, 4;
add.s64 %rd0, %rd0, %rd1;
cvt.rn.f32.u32 %f1, %r0;
cvt.rn.f32.f64 %f2, %fd0;
add.rn.f32 %f1, %f1, %f2;
add.rn.f32 %f0, %f0, %f1;
st.global.f32 [%rd0], %f0;""",
)


def started(*args: Any, **keys: Any) -> FakeDriver:
    """A driver with a context of its first device, current in this thread."""
    gpu = FakeDriver(*args, **keys)
    begin(gpu)
    return gpu
