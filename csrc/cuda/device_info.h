// What CUDA finds on this machine. Without a driver or a device, that is what is found.
#pragma once

#include <string>
#include <vector>

namespace tpk {

struct Device {
  std::string name;
  int capability;  // 10 * major + minor
  int multiprocessors;
  bool multicast;  // memory that a switch writes to many devices, and reads as their sum
};

// Each as 1000 * major + 10 * minor.
struct Versions {
  int runtime = 0;  // that this was built with
  int driver = 0;   // the latest that the driver serves; 0 if there is no driver
};
Versions versions();

struct DeviceInfo {
  std::string problem;  // why no device can be used; empty if one can
  std::vector<Device> devices;
  std::vector<std::vector<bool>> peers;  // [i][j]: device i can address the memory of j
};

// Starts the driver. Throws nothing but bad_alloc.
DeviceInfo device_info();

}  // namespace tpk
